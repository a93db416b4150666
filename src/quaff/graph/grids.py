"""The grids of the IQ types, as ggml defines them: points of 8 values out of 3, or 4 out of 8, by their places in a list of values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def _grid(base: int, steps: str) -> NDArray[np.int16]:
    """[points, values] places in 0..base-1. Points ascend as numbers in that base, first value lowest, and `steps` lie between them:
    a small letter is a step of 1 to 26 that ends at a point; a capital before it adds 26, 52 and so on."""
    sizes = np.array([ord(c) - 96 if c >= "a" else 26 * (ord(c) - 64) for c in steps])
    points = (np.cumsum(sizes) - 1)[[c >= "a" for c in steps]]
    return (points[:, None] // base ** np.arange(8 if base == 3 else 4) % base).astype(np.int16)


IQ2_XXS = _grid(
    3,
    "abbbbbbfbdbbbffdbfbflhbfdnAdllbrAjzbfjbfbdljbflfbdlntbjxbrAdrfdbfldbfbvxxBdjBrbfjhrlfdnflrhjAvjAxfldltApAfAhnBpbfrAbzdBpAtArbfvp"
    "hbAxhAvbCbbfrnAnAbtCrxlAvDvAzbffdbffhdjbfrrAbhdxhxhjAdflAjpvjBhCdbfrdAxApdjBdAfrfdfbAjfxzAtBrCbbxBvAlApjfAfBhBhBzfrxAdAnBdAdAjdC"
    "hbAtEdHfbftAbAbllBlBtbfdnrAjAfAhvtrAlCdCjBvflfAtvAnBfAxtjCjFxArEpAhvAdBvCrJdAv",
)
IQ2_XS = _grid(
    3,
    "abbbbbbbbbbbbdbbbbbbbdbfbbbdbdbjbbbbbbbbbbfbbbdbffdbfrbbbdbfjbfdnhtbbbbbbbdbfbbbdbbdjbfrbbbdbfjbfjhAbbfndbAbxbbbbbbfdfbfflrhbbfr"
    "AbftrfArdjbbbbbbbdbfbbbdbfhbbfrbbbdbfjbfrlbnbbdrrAjbbbdbfjbdblfAbbfrBblvAvbfbpltvdAtBpApbbbbbbbfjbfrrjbfrfpAftAhxdbfpbBbAbjAflpB"
    "hdfbjvtnBflxlAldbtbbbbbbbdbfbbbbbbfdfbfrbbbdbfjbfrdphbfbnbBbbbbdbdbjbfrlpbflfArjhvfAtbfrdhhAhjtfpAfBzbbbdbffdbfrAbbfdnbAzAdAxbbf"
    "jhrjrhfAvfAnAfvhlphAhAbjbDfxbfrlhltbCxnAdpnBxrdArCjAzAxBlAhhAhbbbdbfhbbfrbvbbbbdrjfAlrAjbpfdbfbbnrptAdAttAlAbfpvjbvhCrAhfhjdbfrn"
    "pxtAbBvttdzffBlAlbArClAnAlBhAfAjbdbjhAtAtfAhdbdtAbrAjAnEnttjbdAvffBbbAtbAlp",
)
IQ2_S = _grid(
    3,
    "abbbbbbbbbbbbdbbbbbbbdbbbbbbbdbfddbbbbbbbbdbfbbbdbbbbdbdbfbbfbfbbbdbfhbbbbbdndddhhbbbbbbbdbbbbbbbbbbbbbbbfbbbbdbdbfbbbbbbbbbdbdb"
    "bbbbbbdbfbbbdbfjbbbbdndbdbfjbfrbbbdbbbbddbbbbbbbbdbfdhnbbfbbbdhdbdbfjhrjbhdbjAhlbbbbbbbdbbdbbbdbbbbbbbdbbddbdbfbbbbbbbbbbbbdbbbb"
    "bbbdbfbbbdbpbdbdfbfdfbpbfrbbbdbbbbdbdbbbbbbbdbfbbbdbfjbbbbbbbdbfbbbdbfjbfrdbdbfjbfrzbbbbbdbdhbbbdbfjbxbbbdbfjbfpvjfrnAnbbbdbbbbd"
    "dbbfbbhfhdnbbfbbfhbbfbfjbfrhldbdfxbpdbbbbdbdbfbbbdbfjbfrdbdbfjbfndAbbfrpAldfbpbfzrbbfBfvlAblbtbbbbbbbbbbbdbbbbbbbbbbbfbfdbdbfbbb"
    "dbbbbbbfbbbbbbbdbfbbbdbfjbfbbbffdbdbfjbxbbbbbbbbbbbbdbbbbbbbdbfbbbdbfjbbbbbbbdbfbbbdbfhbbfrbbbdbfjbfrvfbdbbbbdbfbbbdbflfrbbbdbfj"
    "bfrnnbfrBbbbbdbbbbbbbdbbbbbbbdbfbbbdbpbbbbbbbdbfbbbdbfjbfrdbdbfjbfpbAbbbbbbbbdbfbbbdbfjbfrbbbdbfjbfrAbbfndBbbbbdbfjbfhjAbbfrBbpA"
    "ptdbbdbbbdbfdbdbflfrbbbdbfjbfrpnfrnAfhdbdbfjbfrAbbfrhpnpBnpbfAntlzCfArhbbbdbdbdfbfbbbdhdfbpbdbbbbdbfbbbdbpbfpbddbbpbfAtbbbbbbbdh"
    "bbbdbfjbfrbbbdbfjbfrhtbfpbBbdfbpbfAlhbxvAzvblrhbdbbbbffbbbdbfjbfrdfbpbfhAlbfrAxdbbbdbfjbfrnnbfrApdhAfpAhbfndAzbAhdDbrdddhfbbfAlf"
    "AbvAhfldbAddbpdbfrAhnfpCxAzpAxAttAbbjbdAjt",
)
IQ3_XXS = _grid(
    8,
    "abbebdabgiybdbebgdcbgklhbbegbgbdjfndfabkAisteklbdfspAywtdbunpbebgbebbkaxbggbAubebggAhfbnimpkdAiAndrslBynAfbgbebdciAebbcbggAadahb"
    "gfabmamtgdArdAgnxtjAaBqbkwAbgbgbumefbnikbAabemuporBiosfflAaAeruAnutknbldBytoapfqAdAeAkkAgnuBycbnAxwwhfpwAenAfhAoAckdAihwCaArnAxp"
    "bnAcAfAdAkAjfBrAgAkAwAnnAxbbarpArjApAaevmnuAgpAebrBp",
)
IQ3_S = _grid(
    8,
    "aaacbaaabbbadfebcbbbebgccaaabdadccdbdgmdefadbacccdcdfcbbbmchfdcbgbcfdbmbdckdbcffcfojblbdefdboekcbnqogbblbdemdtaabdabbbabgcbnbcif"
    "abcbdegcfgbnfbjcbadffcjcjgccacffadeqfkbebmbgdbdugcfgboAmdcmbAabebgldqfhabbbabbbcbdabgbbcbmacbcbfcdccdcfgxccjbegbjdjcdbcdibebgfnk"
    "ficgcdycgeimakmhbejAbdtdmbkezgbbbcgbbebcbjfhbbgebmpjdbjfjblygdebdaibdfnhfedgqfdmgbkejjmssAfbmbkAidffdccggpjebbgfeffdtbeedjeocfle"
    "bebgdAibrkaylbjAgyqtxekkfyfdfndcclfebbegiAffijefmweaomelffcljlAjlsbBcAfbnBcbblbuppgAcvrfkefhleoBanoncytuAaAobBadciblblfpgkobAbcd"
    "fcgqyxcnvdfexAppAfwAm",
)
IQ1_S = _grid(
    3,
    "abbbbbcebdbefbbhebdbeebdbdafbbbaefdbdbdbbbagfbbhebdbeebdbeffedbbdbbccbbdbkbbhfffddaofffbaahbbhbddaabaabbbbbbbicbbbbaabndlbfbbbca"
    "dbffbdkbdbeebdbefdhebdbeebdbefbdeafhacfbdlbbbfebdbeebdbeffccebbbbeebdbjabdeafbfdbdbaclbbecfbbbbbbbdbdfdaaaaaabbdhhbfbpbbheebdbbb"
    "dbhfbbhfdbeabacdecaabbbaabdbbfdbcabaabbacdbdbbaabbbbbbbbaaeaaaababbaabbbaabbaabaabaabbfbaahaabbddbaabbbcaaacbabaafccbhdldhfbbbbd"
    "bbaabbbffbjnbbdbcgaabdbaabaaddhcabbddbiggbgbbbbbbddbffdcjbdbeebbbbeffccebdbeebbbbefbdfgadfbbbbaaheebffebbcebdbefdbffebbcebdbehbb"
    "fhaabdbbbfhfbdcclfffbdbdbacdbbjbcabbbbbbfebeffffeafebdhjbdbeebdbefbjebdbjbdbhcbdfjbdbfbbbfeebeaebdbjbdbefdbfebdbeebdbefdhldbbbbb"
    "bpdcddabbbdbaabbdbfbbbbaabaebbbbbdbbeaakfbbhfjbdddiejflcifbbbbaaeabbbbdbbbbeafcabdbbaabbddbbaabbabaaaacbaabdaabdbaabaebbbcceabbb"
    "bdbbbbcaababdbbdcddafbbhfcdegebdbdbbbffbbbffcacacabdbbdddbaaaabbbbacfbdbaadbbbppbbfbbddnjfbaabdbdbbdbdbdbaabfbhbfbcadbfbaabbaaaa"
    "bdaabbbaabbaaaaaaaabbaabdbfbaabbddbdfbdbbhbdbbaabdbiebbcadiafbaaaaccbbbbaabaaabaaaaabaaaabbfbbbaabcbadbaaaabbaaaaababbaabbaaaaaa"
    "abaaaaaaaaaabaaaaabbacaaabaaaacbaabbaaabaacbababaaaaaaaccaaaaaaaaaaaaabbacdbaaaabcdcbaaaeaabbdbdgebbbbaaaabbaagebbbbdfcabdbbaabf"
    "fbaabbaaaaaaaabbaabccccbaaaafhcgdadabfbaccaaadbbbbgcbaabblhbbfhfdaabbbbbcmhfbbbdbfacbfcccabfacdecbfdbldbkadhaacmfdhoabacbdbbbbbb"
    "bbaabaabbhacbbaaaabbbdfbbbcabnaabbabaabcbaabgbabcabacbaaeefeeaabdbbbbaaabadbcbbddbaabcbcobffjbdbfffehebfdfbbbbacaadbaabbddcaeefb"
    "acldambdbdbbdacggcbfdbdbjbdbeeabbbfebdbeebdbefbbbffbdbbbaaaebbfcebbfebdbeebdbkbdfebdbeebdbmdlbgcdbbdndlfdbdfbbacbdbaabaeaabbbbbb"
    "bbbhndbffbdaadcabdcefgdfbdbeebdbbcfbdfcbbdbeebdbeaebbhfbbbbbbdbbjjbfebdbeebdbefbbmbdbeebdbefdaaffdbfbbhaefbbbffbbbbdbbbbbbbdeaba"
    "abdbhbfbbdbbbffbdfhbbbbbbhbfhbkcbbddbhdhbbaaaabaabhbfaabdfbdbbaabaabcccabbaabbaaaaaaaabbaabccbdaaaabaabbbbbbfdcbebfbacababfbeada"
    "caahbbfjbffddbbacdaifdbfhbbbbbbbaabbdbbbbbbaabdbacbbfbbdbdhiihbbbdbdlfbaambdbeebdbefbbbkbdbeebdbeccbbbaobccbbbbjebcbmdbagddbefdb"
    "febdbeebdbqffbfcabbbcaaafAbbbbbbhbdbfbaabfdbbaabdbbpfdcbchbccbaacblddabcbbdbdbjbdbkbbbkbdbeebdbehdccfhddbdbkembdbjbdbkbbmbdbeebd"
    "b",
)
