"""ggml tensor types: their names and block sizes. A tensor's rows are whole blocks of `block` values in `nbytes` bytes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One storage type: `id` as written in files, `block` values per block, `nbytes` bytes per block."""

    id: int
    name: str
    block: int
    nbytes: int


# Sizes as in ggml's block structs; a test compares them with the gguf package.
GGML_TYPES: dict[int, GgmlType] = {
    t.id: t
    for t in (
        GgmlType(0, "F32", 1, 4),
        GgmlType(1, "F16", 1, 2),
        GgmlType(30, "BF16", 1, 2),
        GgmlType(2, "Q4_0", 32, 18),
        GgmlType(3, "Q4_1", 32, 20),
        GgmlType(6, "Q5_0", 32, 22),
        GgmlType(7, "Q5_1", 32, 24),
        GgmlType(8, "Q8_0", 32, 34),
        GgmlType(10, "Q2_K", 256, 84),
        GgmlType(11, "Q3_K", 256, 110),
        GgmlType(12, "Q4_K", 256, 144),
        GgmlType(13, "Q5_K", 256, 176),
        GgmlType(14, "Q6_K", 256, 210),
        GgmlType(20, "IQ4_NL", 32, 18),
        GgmlType(23, "IQ4_XS", 256, 136),
        GgmlType(39, "MXFP4", 32, 17),
        GgmlType(40, "NVFP4", 64, 36),
        GgmlType(19, "IQ1_S", 256, 50),
        GgmlType(29, "IQ1_M", 256, 56),
        GgmlType(16, "IQ2_XXS", 256, 66),
        GgmlType(17, "IQ2_XS", 256, 74),
        GgmlType(22, "IQ2_S", 256, 82),
        GgmlType(18, "IQ3_XXS", 256, 98),
        GgmlType(21, "IQ3_S", 256, 110),
        GgmlType(34, "TQ1_0", 256, 54),
        GgmlType(35, "TQ2_0", 256, 66),
    )
}

# Types that exist but cannot be read: known so that the error can name them.
OTHER_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    41: "Q1_0",
}

SUPPORTED_TYPES = ", ".join(t.name for t in GGML_TYPES.values())
