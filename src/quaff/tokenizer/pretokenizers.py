r"""How a byte-level vocabulary cuts text into words: `tokenizer.ggml.pre` -> regular expressions, applied one after another.

The expressions are those of llama.cpp (`src/llama-vocab.cpp`, `src/unicode.cpp`), in Oniguruma syntax. Where llama.cpp's reading of
an expression differs from the expression itself, the reading is written down: token ids have to agree, not the spelling.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quaff.errors import UnsupportedError, quote


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns`: each cuts every piece left by the one before; what it does not match is a piece too.

    `ignore_merges`: a word that is a token as a whole becomes that token without merging. `add_bos`: the default where the file has no
    `tokenizer.ggml.add_bos_token`.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


# The code points that Unicode 16 added: llama.cpp's tables are those of Unicode 15.1, the engine's may be newer.
_NEWER = (
    "897 1b4e-1b4f 1b7f 1c89-1c8a 2427-2429 31e4-31e5 a7cb-a7cd a7da-a7dc 105c0-105f3 10d40-10d65 10d69-10d85 10d8e-10d8f "
    "10ec2-10ec4 10efc 11380-11389 1138b 1138e 11390-113b5 113b7-113c0 113c2 113c5 113c7-113ca 113cc-113d5 113d7-113d8 "
    "113e1-113e2 116d0-116e3 11bc0-11be1 11bf0-11bf9 11f5a 13460-143fa 16100-16139 16d40-16d79 18cff 1cc00-1ccf9 1cd00-1ceb3 "
    "1e5d0-1e5fa 1e5ff 1f8b2-1f8bb 1f8c0-1f8c1 1fa89 1fa8f 1fabe 1fac6 1fadc 1fadf 1fae9 1fbcb-1fbef"
)
_NOT_NEWER = "[^" + re.sub(r"\w+", r"\\x{\g<0>}", _NEWER).replace(" ", "") + "]"


def engine_pattern(pattern: str) -> str:
    """A pattern of `PreTokenizer` as the regular expression engine gets it, with llama.cpp's view of the Unicode categories."""
    return re.sub(r"\\p\{\w\}", lambda category: f"[{category[0]}&&{_NOT_NEWER}]", pattern)


_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACE}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_MARKS}|{_SPACE}"
_QWEN35 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"


def _cased(letters: str, tail: str) -> str:
    """Words that end where case changes; only ASCII case counts, every other letter fits both halves (llama.cpp's reading)."""
    upper, lower = rf"(?:(?=[{letters}])[^a-z])", rf"(?:(?=[{letters}])[^A-Z])"
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{upper}*{lower}+{tail}|{start}{upper}+{lower}*{tail}"


_TEKKEN = _cased(r"\p{L}", "") + rf"|\p{{N}}|{_MARKS_SLASH}|{_SPACE}"
_GPT4O = _cased(r"\p{L}", _CONTRACTION + "?") + rf"|\p{{N}}{{1,3}}|{_MARKS_SLASH}|{_SPACE}"
_GRANITE_MULTILINGUAL = _cased(r"\p{L}\p{M}", _CONTRACTION + "?") + rf"|\p{{N}}{{1,3}}|{_MARKS_SLASH}|{_SPACE}"

_PUNCTUATED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK_WORD = rf"{_PUNCTUATED}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_DEEPSEEK_WORD}[\r\n]*|{_SPACE}",
)
# In llama.cpp the categories Lu, Lt, Lm, Lo and Ll all mean "a letter".
_ANY_LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]*[\p{L}\p{M}]+"
_ANY_LETTERS_2 = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+[\p{L}\p{M}]*"
_ANY_CASE = rf"{_ANY_LETTERS}{_CONTRACTION}?|{_ANY_LETTERS_2}{_CONTRACTION}?"
# Numbers in threes from the right; the first group takes the text before it along (llama.cpp's hand-written splitter does). After a
# digit the groups are aligned already: asking that first, and taking a text without digits whole, keeps the search linear.
_DIGITS_FROM_RIGHT = r"(?<=\p{N})\p{N}{3}|[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|[^\p{N}]+"
_WIDE_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s"

# The alphabetic ranges of the deepseek-llm file, as code points.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d"
    "\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126"
    "\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

_BY_PATTERNS: dict[tuple[str, ...], str] = {
    (_GPT2,): "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert exaone4 mpt olmo jais trillion "
    "granite-docling",
    (r"\p{N}", _GPT2): "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"): "default",
    (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"): "falcon",
    (_LLAMA3,): "dbrx smaug-bpe glm4 chatglm-bpe",
    (_QWEN2,): "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    (_QWEN35,): "qwen35",
    (rf"{_WORD}|\p{{N}}|{_MARKS}|{_SPACE}",): "ufakzeka",
    ("[^\n]+|[\n]+", _QWEN2): "laguna",
    (rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}",): "seed-coder",
    (rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_MARKS}|\s*[\r\n]|\s+(?!\S)|\s+",): "bailingmoe bailingmoe2 llada-moe",
    (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ): "exaone-moe",
    _DEEPSEEK_V3: "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    (*_DEEPSEEK_V3[:2], rf"{_DEEPSEEK_WORD}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"): "spark2_5",
    (
        "[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"(?<!\s)\s+\z",
        _DEEPSEEK_CJK,
        r"\p{N}+",
    ): "deepseek-llm",
    ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"): "deepseek-coder",
    (_GPT4O,): "gpt-4o llama4 kanana2 talkie minimax-m2",
    (_DIGITS_FROM_RIGHT, rf"{_ANY_CASE}|\p{{N}}{{1,3}}|{_MARKS_SLASH}|{_SPACE}"): "tiny_aya cohere2moe",
    (
        _DIGITS_FROM_RIGHT,
        "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e00-\u0e7f\u0e80-\u0eff"
        "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        rf"{_DEEPSEEK_WORD}[\r\n]*|{_SPACE}",
    ): "afmoe",
    (" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",): "poro-chat bloom gpt3-finnish",
    (" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}"): "viking",
    (r"\p{N}+", r"(?<=[0-9])[0-9]{3}|[0-9]{1,3}(?=(?:[0-9]{3})*(?![0-9]))"): "superbpe",
    (rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|\s*[\r\n]+|{_WIDE_SPACES}",): "jais-2",
}

_WITH_FLAGS: dict[str, PreTokenizer] = {
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer((_LLAMA3,), True, True),
    "tekken": PreTokenizer((_TEKKEN,), True, True),
    "granite-embed-multi-97m": PreTokenizer((_GRANITE_MULTILINGUAL,), True),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_MARKS}|{_SPACE}"), True),
    "youtu": PreTokenizer(
        (
            "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
            "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            rf"{_ANY_CASE}|\p{{N}}|{_MARKS_SLASH}|{_SPACE}",
        ),
        True,
    ),
    "chameleon": PreTokenizer(
        ("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2), False, True
    ),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: rule
    for names, rule in [*((names, PreTokenizer(patterns)) for patterns, names in _BY_PATTERNS.items()), *_WITH_FLAGS.items()]
    for name in names.split()
}
"""Every known name of `tokenizer.ggml.pre`."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """The rule called `name`; raises UnsupportedError, which lists the known names, for any other."""
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedError(f"tokenizer.ggml.pre is {quote(name)}, which is not a known pre-tokenizer; known: {known}")
    return rule
