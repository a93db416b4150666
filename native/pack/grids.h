// The grids of the IQ types, as ggml defines them. A point is 8 values out of 3, or 4 values out of 8, by their places in a list (the
// codebooks in blocks.h). Read as numbers in base 3 or 8, first value lowest, the points ascend; the steps between them are written here.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string_view>

namespace quaff::blocks {

// A small letter is a step of 1 to 26 that ends at a point; a capital before it adds 26, 52 and so on. Places of 8 values take 2 bits each, of 4
// values 4 bits each, first value lowest.
template <size_t points, int base> constexpr std::array<uint16_t, points> grid(std::string_view steps) {
    constexpr int values = base == 3 ? 8 : 4;
    std::array<uint16_t, points> out{};
    size_t n = 0;
    int at = -1;
    for (const char step : steps) {
        if (step < 'a') {
            at += 26 * (step - 'A' + 1);
            continue;
        }
        at += step - 'a' + 1;
        for (int i = 0, rest = at; i < values; i++, rest /= base)
            out[n] = static_cast<uint16_t>(out[n] | rest % base << 16 / values * i);
        n++;
    }
    if (n != points)
        throw std::length_error("a grid of another size");
    return out;
}

inline constexpr auto kGrid2xxs = grid<256, 3>(
    "abbbbbbfbdbbbffdbfbflhbfdnAdllbrAjzbfjbfbdljbflfbdlntbjxbrAdrfdbfldbfbvxxBdjBrbfjhrlfdnflrhjAvjAxfldltApAfAhnBpbfrAbzdBpAtArbfvp"
    "hbAxhAvbCbbfrnAnAbtCrxlAvDvAzbffdbffhdjbfrrAbhdxhxhjAdflAjpvjBhCdbfrdAxApdjBdAfrfdfbAjfxzAtBrCbbxBvAlApjfAfBhBhBzfrxAdAnBdAdAjdC"
    "hbAtEdHfbftAbAbllBlBtbfdnrAjAfAhvtrAlCdCjBvflfAtvAnBfAxtjCjFxArEpAhvAdBvCrJdAv");
inline constexpr auto kGrid2xs = grid<512, 3>(
    "abbbbbbbbbbbbdbbbbbbbdbfbbbdbdbjbbbbbbbbbbfbbbdbffdbfrbbbdbfjbfdnhtbbbbbbbdbfbbbdbbdjbfrbbbdbfjbfjhAbbfndbAbxbbbbbbfdfbfflrhbbfr"
    "AbftrfArdjbbbbbbbdbfbbbdbfhbbfrbbbdbfjbfrlbnbbdrrAjbbbdbfjbdblfAbbfrBblvAvbfbpltvdAtBpApbbbbbbbfjbfrrjbfrfpAftAhxdbfpbBbAbjAflpB"
    "hdfbjvtnBflxlAldbtbbbbbbbdbfbbbbbbfdfbfrbbbdbfjbfrdphbfbnbBbbbbdbdbjbfrlpbflfArjhvfAtbfrdhhAhjtfpAfBzbbbdbffdbfrAbbfdnbAzAdAxbbf"
    "jhrjrhfAvfAnAfvhlphAhAbjbDfxbfrlhltbCxnAdpnBxrdArCjAzAxBlAhhAhbbbdbfhbbfrbvbbbbdrjfAlrAjbpfdbfbbnrptAdAttAlAbfpvjbvhCrAhfhjdbfrn"
    "pxtAbBvttdzffBlAlbArClAnAlBhAfAjbdbjhAtAtfAhdbdtAbrAjAnEnttjbdAvffBbbAtbAlp");
inline constexpr auto kGrid2s = grid<1024, 3>(
    "abbbbbbbbbbbbdbbbbbbbdbbbbbbbdbfddbbbbbbbbdbfbbbdbbbbdbdbfbbfbfbbbdbfhbbbbbdndddhhbbbbbbbdbbbbbbbbbbbbbbbfbbbbdbdbfbbbbbbbbbdbdb"
    "bbbbbbdbfbbbdbfjbbbbdndbdbfjbfrbbbdbbbbddbbbbbbbbdbfdhnbbfbbbdhdbdbfjhrjbhdbjAhlbbbbbbbdbbdbbbdbbbbbbbdbbddbdbfbbbbbbbbbbbbdbbbb"
    "bbbdbfbbbdbpbdbdfbfdfbpbfrbbbdbbbbdbdbbbbbbbdbfbbbdbfjbbbbbbbdbfbbbdbfjbfrdbdbfjbfrzbbbbbdbdhbbbdbfjbxbbbdbfjbfpvjfrnAnbbbdbbbbd"
    "dbbfbbhfhdnbbfbbfhbbfbfjbfrhldbdfxbpdbbbbdbdbfbbbdbfjbfrdbdbfjbfndAbbfrpAldfbpbfzrbbfBfvlAblbtbbbbbbbbbbbdbbbbbbbbbbbfbfdbdbfbbb"
    "dbbbbbbfbbbbbbbdbfbbbdbfjbfbbbffdbdbfjbxbbbbbbbbbbbbdbbbbbbbdbfbbbdbfjbbbbbbbdbfbbbdbfhbbfrbbbdbfjbfrvfbdbbbbdbfbbbdbflfrbbbdbfj"
    "bfrnnbfrBbbbbdbbbbbbbdbbbbbbbdbfbbbdbpbbbbbbbdbfbbbdbfjbfrdbdbfjbfpbAbbbbbbbbdbfbbbdbfjbfrbbbdbfjbfrAbbfndBbbbbdbfjbfhjAbbfrBbpA"
    "ptdbbdbbbdbfdbdbflfrbbbdbfjbfrpnfrnAfhdbdbfjbfrAbbfrhpnpBnpbfAntlzCfArhbbbdbdbdfbfbbbdhdfbpbdbbbbdbfbbbdbpbfpbddbbpbfAtbbbbbbbdh"
    "bbbdbfjbfrbbbdbfjbfrhtbfpbBbdfbpbfAlhbxvAzvblrhbdbbbbffbbbdbfjbfrdfbpbfhAlbfrAxdbbbdbfjbfrnnbfrApdhAfpAhbfndAzbAhdDbrdddhfbbfAlf"
    "AbvAhfldbAddbpdbfrAhnfpCxAzpAxAttAbbjbdAjt");
inline constexpr auto kGrid3xxs = grid<256, 8>(
    "abbebdabgiybdbebgdcbgklhbbegbgbdjfndfabkAisteklbdfspAywtdbunpbebgbebbkaxbggbAubebggAhfbnimpkdAiAndrslBynAfbgbebdciAebbcbggAadahb"
    "gfabmamtgdArdAgnxtjAaBqbkwAbgbgbumefbnikbAabemuporBiosfflAaAeruAnutknbldBytoapfqAdAeAkkAgnuBycbnAxwwhfpwAenAfhAoAckdAihwCaArnAxp"
    "bnAcAfAdAkAjfBrAgAkAwAnnAxbbarpArjApAaevmnuAgpAebrBp");
inline constexpr auto kGrid3s = grid<512, 8>(
    "aaacbaaabbbadfebcbbbebgccaaabdadccdbdgmdefadbacccdcdfcbbbmchfdcbgbcfdbmbdckdbcffcfojblbdefdboekcbnqogbblbdemdtaabdabbbabgcbnbcif"
    "abcbdegcfgbnfbjcbadffcjcjgccacffadeqfkbebmbgdbdugcfgboAmdcmbAabebgldqfhabbbabbbcbdabgbbcbmacbcbfcdccdcfgxccjbegbjdjcdbcdibebgfnk"
    "ficgcdycgeimakmhbejAbdtdmbkezgbbbcgbbebcbjfhbbgebmpjdbjfjblygdebdaibdfnhfedgqfdmgbkejjmssAfbmbkAidffdccggpjebbgfeffdtbeedjeocfle"
    "bebgdAibrkaylbjAgyqtxekkfyfdfndcclfebbegiAffijefmweaomelffcljlAjlsbBcAfbnBcbblbuppgAcvrfkefhleoBanoncytuAaAobBadciblblfpgkobAbcd"
    "fcgqyxcnvdfexAppAfwAm");
inline constexpr auto kGrid1 = grid<2048, 3>(
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
    "b");

} // namespace quaff::blocks
