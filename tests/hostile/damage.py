"""Damaged model files. A good GGUF file is taken apart, one thing is made wrong, and it is put together again.

Each damage says what the error must mention, and whether opening the file finds it ("open"), or loading or running it does ("load").
`python -m tests.hostile.damage good.gguf folder` writes them all.
"""

import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

U8, I32, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 5, 4, 6, 7, 8, 9, 10
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def f32(x: float) -> bytes:
    return struct.pack("<f", x)


def text(content: bytes) -> bytes:
    return u64(len(content)) + content


def array(kind: int, items: list[bytes]) -> bytes:
    return u32(kind) + u64(len(items)) + b"".join(items)


@dataclass
class Entry:
    """A metadata entry: `value` as bytes, with nothing checked."""

    key: bytes
    kind: int
    value: bytes

    def pack(self) -> bytes:
        return text(self.key) + u32(self.kind) + self.value


@dataclass
class Tensor:
    """A tensor entry and its data. `dims` in file order; `offset` None: after the tensor before."""

    name: bytes
    dims: list[int]
    kind: int
    data: bytes
    offset: int | None = None
    rank: int | None = None


@dataclass
class Model:
    """A GGUF file taken apart."""

    version: int = 3
    entries: list[Entry] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    entry_count: int | None = None
    tensor_count: int | None = None
    alignment: int = 32

    @classmethod
    def parse(cls, content: bytes) -> "Model":
        """Take a good file with the default alignment apart; each tensor's data run to the start of the next one."""
        at = 4

        def take(form: str) -> int:
            nonlocal at
            (n,) = struct.unpack_from(form, content, at)
            at += struct.calcsize(form)
            return int(n)

        def take_text() -> bytes:
            nonlocal at
            n = take("<Q")
            at += n
            return content[at - n : at]

        model = cls(take("<I"))
        tensors, entries = take("<Q"), take("<Q")
        for _ in range(entries):
            key, kind, start = take_text(), take("<I"), at
            if kind == STRING:
                take_text()
            elif kind == ARRAY:
                inner, n = take("<I"), take("<Q")
                if inner == STRING:
                    for _ in range(n):
                        take_text()
                else:
                    at += n * SIZES[inner]
            else:
                at += SIZES[kind]
            model.entries.append(Entry(key, kind, content[start:at]))
        offsets = []
        for _ in range(tensors):
            name = take_text()
            dims = [take("<Q") for _ in range(take("<I"))]
            model.tensors.append(Tensor(name, dims, take("<I"), b""))
            offsets.append(take("<Q"))
        data = -(-at // model.alignment) * model.alignment
        ends = sorted([*offsets, len(content) - data])
        for tensor, offset in zip(model.tensors, offsets, strict=True):
            tensor.data = content[data + offset : data + ends[ends.index(offset) + 1]]
        return model

    def header(self) -> bytes:
        out = b"GGUF" + u32(self.version)
        out += u64(len(self.tensors) if self.tensor_count is None else self.tensor_count)
        out += u64(len(self.entries) if self.entry_count is None else self.entry_count)
        return out

    def metadata(self) -> bytes:
        return b"".join(entry.pack() for entry in self.entries)

    def table(self) -> bytes:
        out, end = b"", 0
        for tensor in self.tensors:
            offset = end if tensor.offset is None else tensor.offset
            rank = len(tensor.dims) if tensor.rank is None else tensor.rank
            out += text(tensor.name) + u32(rank) + b"".join(map(u64, tensor.dims)) + u32(tensor.kind) + u64(offset)
            end += -(-len(tensor.data) // self.alignment) * self.alignment
        return out

    def data_start(self) -> int:
        return -(-len(self.header() + self.metadata() + self.table()) // self.alignment) * self.alignment

    def pack(self) -> bytes:
        out = (self.header() + self.metadata() + self.table()).ljust(self.data_start(), b"\0")
        for tensor in self.tensors:
            out += tensor.data.ljust(-(-len(tensor.data) // self.alignment) * self.alignment, b"\0")
        return out

    def entry(self, key: str) -> Entry:
        return next(entry for entry in self.entries if entry.key == key.encode())

    def tensor(self, name: str) -> Tensor:
        return next(tensor for tensor in self.tensors if tensor.name == name.encode())

    def put(self, key: str, kind: int, value: bytes) -> None:
        """Set a metadata entry, adding it where it is missing."""
        self.drop(key)
        self.entries.append(Entry(key.encode(), kind, value))

    def drop(self, key: str) -> None:
        self.entries = [entry for entry in self.entries if entry.key != key.encode()]


@dataclass(frozen=True)
class Damage:
    """`make` turns a fresh Model into the bytes of a damaged file; `said` is a regular expression that the error must match."""

    name: str
    stage: Literal["open", "load"]
    said: str
    make: Callable[[Model], bytes]


DAMAGES: dict[str, Damage] = {}


def damage(stage: Literal["open", "load"], said: str) -> Callable[[Callable[[Model], bytes | None]], Callable[[Model], bytes | None]]:
    def register(function: Callable[[Model], bytes | None]) -> Callable[[Model], bytes | None]:
        def make(model: Model) -> bytes:
            made = function(model)
            return model.pack() if made is None else made

        name = function.__name__.replace("_", "-")
        DAMAGES[name] = Damage(name, stage, said, make)
        return function

    return register


def _metadata(name: str, said: str, key: str, kind: int, value: bytes) -> None:
    """A damage that only sets one metadata entry, found at loading. `<a>` in `key` stands for the architecture."""

    def make(model: Model) -> bytes:
        architecture = model.entry("general.architecture").value[8:].decode()
        model.put(key.replace("<a>", architecture), kind, value)
        return model.pack()

    DAMAGES[name] = Damage(name, "load", said, make)


# The file is cut.


@damage("open", "empty")
def empty(m: Model) -> bytes:
    return b""


@damage("open", "not a GGUF file")
def cut_in_magic(m: Model) -> bytes:
    return m.pack()[:3]


@damage("open", "the header needs 16 bytes of file, but the file ends at 12")
def cut_in_header(m: Model) -> bytes:
    return m.pack()[:12]


@damage("open", "more than a file of 24 bytes can hold; it may be an unfinished download")
def cut_after_header(m: Model) -> bytes:
    return m.pack()[:24]


@damage("open", "metadata '.*'.* it may be an unfinished download")
def cut_in_metadata(m: Model) -> bytes:
    return m.pack()[: len(m.header()) + len(m.metadata()) * 3 // 4]


@damage("open", "tensor entry|the entry of tensor|ends at byte .* it may be an unfinished download")
def cut_in_tensor_table(m: Model) -> bytes:
    return m.pack()[: len(m.header() + m.metadata()) + len(m.table()) // 2]


@damage("open", "ends at byte .*, but the file ends at .*; it may be an unfinished download")
def cut_at_data(m: Model) -> bytes:
    return m.pack()[: m.data_start()]


@damage("open", "unfinished download")
def cut_in_data(m: Model) -> bytes:
    return m.pack()[: m.data_start() + sum(len(t.data) for t in m.tensors) // 2]


# The header lies.


@damage("open", "big-endian")
def big_endian(m: Model) -> bytes:
    content = m.pack()
    return content[:4] + content[4:8][::-1] + content[8:]


@damage("open", "version 1;")
def version_1(m: Model) -> None:
    m.version = 1


@damage("open", "version 99;")
def version_99(m: Model) -> None:
    m.version = 99


@damage("open", "claims 18446744073709551615 tensors")
def huge_tensor_count(m: Model) -> None:
    m.tensor_count = 2**64 - 1


@damage("open", "claims .* and 9223372036854775808 metadata entries")
def huge_entry_count(m: Model) -> None:
    m.entry_count = 2**63


@damage("open", "damaged GGUF file")
def one_entry_too_many(m: Model) -> None:
    m.entry_count = len(m.entries) + 1


@damage("open", "damaged GGUF file")
def one_entry_too_few(m: Model) -> None:
    m.entry_count = len(m.entries) - 1


@damage("open", "damaged GGUF file")
def one_tensor_too_many(m: Model) -> None:
    m.tensor_count = len(m.tensors) + 1


@damage("open", "is part 1 of 4 of a split model; to find the others, its name has to end with -00001-of-00004.gguf")
def split(m: Model) -> None:
    m.put("split.no", 2, struct.pack("<H", 0))
    m.put("split.count", 2, struct.pack("<H", 4))


# Metadata that cannot be read.


@damage("open", "claims 9223372036854775807 bytes of text")
def huge_key(m: Model) -> bytes:
    return m.header() + u64(2**63 - 1) + m.pack()[len(m.header()) + 8 :]


@damage("open", "is 0 bytes long")
def empty_key(m: Model) -> None:
    m.entries[1].key = b""


@damage("open", "the key of metadata entry 1 of .* is not valid UTF-8")
def bad_utf8_in_key(m: Model) -> None:
    m.entries[1].key = b"bad.\xff\xfe"


@damage("open", "metadata 'general.name' claims 1099511627776 bytes of text")
def huge_string(m: Model) -> None:
    m.put("general.name", STRING, u64(2**40) + b"short")


@damage("open", "metadata 'general.name' is not valid UTF-8")
def bad_utf8_in_value(m: Model) -> None:
    m.put("general.name", STRING, text(b"caf\xe9\n\x1b[31m"))


@damage("open", r"entry 1 of metadata 'tokenizer\.ggml\.merges' is not valid UTF-8")
def bad_utf8_in_array(m: Model) -> None:
    m.put("tokenizer.ggml.merges", ARRAY, array(STRING, [text(b"a b"), text(b"\xc3\x28")]))


@damage("open", r"entry 0 of metadata 'tokenizer\.ggml\.tokens' is not valid UTF-8")
def bad_utf8_in_token(m: Model) -> None:
    m.put("tokenizer.ggml.tokens", ARRAY, array(STRING, [text(b"\xed\xb3\xa5")]))


@damage("open", "claims 2305843009213693952 numbers")
def huge_number_array(m: Model) -> None:
    m.put("general.numbers", ARRAY, u32(U64) + u64(2**61) + bytes(64))


@damage("open", "claims 4611686018427387904 strings")
def huge_string_array(m: Model) -> None:
    m.put("tokenizer.ggml.tokens", ARRAY, u32(STRING) + u64(2**62) + bytes(64))


@damage("open", r"metadata 'tokenizer\.ggml\.tokens' needs 18446744073709\d+ bytes of file")
def huge_string_in_array(m: Model) -> None:
    m.put("tokenizer.ggml.tokens", ARRAY, u32(STRING) + u64(2) + text(b"a") + u64(2**64 - 1) + bytes(64))


@damage("open", "array of arrays")
def nested_arrays(m: Model) -> None:
    m.put("general.nested", ARRAY, (u32(ARRAY) + u64(1)) * 5000 + u32(U8) + u64(0))


@damage("open", "metadata 'general.odd' has value type 42, which does not exist")
def unknown_value_type(m: Model) -> None:
    m.put("general.odd", 42, b"")


@damage("open", "is an array of value type 42")
def unknown_array_type(m: Model) -> None:
    m.put("general.odd", ARRAY, u32(42) + u64(1) + bytes(8))


@damage("open", "boolean with the value 7")
def boolean_of_7(m: Model) -> None:
    m.put("general.flag", BOOL, b"\x07")


@damage("open", "boolean that is neither 0 nor 1")
def boolean_array_of_7(m: Model) -> None:
    m.put("general.flags", ARRAY, array(BOOL, [b"\0", b"\x07"]))


@damage("open", "metadata 'general.architecture' appears twice")
def duplicate_key(m: Model) -> None:
    m.entries.append(replace(m.entry("general.architecture")))


@damage("open", "'general.alignment' is 0;")
def alignment_0(m: Model) -> None:
    m.put("general.alignment", U32, u32(0))


@damage("open", "'general.alignment' is 24;")
def alignment_24(m: Model) -> None:
    m.put("general.alignment", U32, u32(24))


@damage("open", "'general.alignment' is 2147483648;")
def huge_alignment(m: Model) -> None:
    m.put("general.alignment", U32, u32(2**31))


@damage("open", "'general.alignment' is not an unsigned 32-bit number")
def alignment_of_text(m: Model) -> None:
    m.put("general.alignment", STRING, text(b"32"))


@damage("open", r"'general\.architecture' is missing")
def no_architecture(m: Model) -> None:
    m.drop("general.architecture")


@damage("open", r"'general\.architecture' is not a name")
def architecture_of_number(m: Model) -> None:
    m.put("general.architecture", U32, u32(7))


# Tensor entries that cannot be true.


@damage("open", "is 0 bytes long")
def empty_tensor_name(m: Model) -> None:
    m.tensors[0].name = b""


@damage("open", "is 70000 bytes long")
def long_tensor_name(m: Model) -> None:
    m.tensors[0].name = b"x" * 70000


@damage("open", "the name of tensor entry 0 of .* is not valid UTF-8")
def bad_utf8_in_tensor_name(m: Model) -> None:
    m.tensors[0].name = b"\x80weight"


@damage("open", "tensor '.*' appears twice")
def duplicate_tensor(m: Model) -> None:
    m.tensors[1].name = m.tensors[0].name


@damage("open", "has 0 dimensions")
def no_dimensions(m: Model) -> None:
    m.tensors[0].dims = []


@damage("open", "has 5 dimensions")
def five_dimensions(m: Model) -> None:
    m.tensors[0].dims += [1] * (5 - len(m.tensors[0].dims))


@damage("open", "has 4294967295 dimensions")
def huge_rank(m: Model) -> None:
    m.tensors[0].rank = 2**32 - 1


@damage("open", "has an empty dimension")
def zero_dimension(m: Model) -> None:
    m.tensor("token_embd.weight").dims[1] = 0


@damage("open", r"tensor 'token_embd\.weight' ends at byte \d{20,}, but the file ends at \d+$")
def dimensions_that_wrap_to_zero(m: Model) -> None:
    m.tensor("token_embd.weight").dims = [2**32, 2**32]


@damage("open", r"tensor 'token_embd\.weight' ends at byte \d{20,}, but the file ends at \d+$")
def dimensions_that_overflow(m: Model) -> None:
    m.tensor("token_embd.weight").dims = [2**63, 2**63, 2**63, 2**63]


@damage("open", "ends at byte|overlap")
def too_many_rows(m: Model) -> None:
    m.tensors[-1].dims[-1] *= 3


@damage("open", "has rows of 33 values, but type .* needs a multiple of 32")
def row_that_is_no_whole_block(m: Model) -> None:
    tensor = next(t for t in m.tensors if t.kind in (2, 3, 6, 7, 8))
    tensor.dims[0] = 33


@damage("open", "unknown type number 9999")
def unknown_tensor_type(m: Model) -> None:
    m.tensors[0].kind = 9999


@damage("open", "has type Q1_0, which is not supported; supported types: F32, F16, BF16, Q4_0")
def unsupported_tensor_type(m: Model) -> None:
    m.tensors[0].kind = 41


@damage("open", "has type Q4_2, which is not supported")
def removed_tensor_type(m: Model) -> None:
    m.tensors[0].kind = 4


@damage("open", "which is not a multiple of 32")
def unaligned_offset(m: Model) -> None:
    m.tensors[1].offset = 4


@damage("open", r"ends at byte .*, but the file ends at \d+$")
def offset_past_the_end(m: Model) -> None:
    m.tensors[0].offset = 2**40


@damage("open", r"ends at byte .*, but the file ends at \d+$")
def offset_that_wraps(m: Model) -> None:
    m.tensors[0].offset = 2**64 - 32


@damage("open", "tensors '.*' and '.*' overlap")
def overlapping_tensors(m: Model) -> None:
    m.tensors[1].offset = 0


# Files that can be read, and hold a model that cannot be.

_metadata(
    "unknown-architecture",
    "architecture 'elephant' is not supported; supported: .*llama",
    "general.architecture",
    STRING,
    text(b"elephant"),
)
_metadata("architecture-with-line-break", r"architecture 'a\\nb\\x1b\[31m'", "general.architecture", STRING, text(b"a\nb\x1b[31m"))
_metadata("layers-of-text", "block_count", "<a>.block_count", STRING, text(b"two"))
_metadata("huge-layer-count", "block_count is 4294967295", "<a>.block_count", U32, u32(2**32 - 1))
_metadata("no-layers", "block_count is 0", "<a>.block_count", U32, u32(0))
_metadata("more-layers-than-tensors", "missing tensor blk", "<a>.block_count", U32, u32(40))
_metadata("huge-width", "embedding", "<a>.embedding_length", U32, u32(2**32 - 16))
_metadata("width-of-zero", "embedding", "<a>.embedding_length", U32, u32(0))
_metadata("other-width", "shape|length|divide", "<a>.embedding_length", U32, u32(16))
_metadata("width-that-is-a-fraction", "embedding_length", "<a>.embedding_length", F32, f32(64.5))
_metadata("no-heads", "head", "<a>.attention.head_count", U32, u32(0))
_metadata("huge-head-count", "head", "<a>.attention.head_count", U32, u32(2**31))
_metadata("negative-head-count", "head_count", "<a>.attention.head_count", I32, struct.pack("<i", -4))
_metadata("heads-that-do-not-divide", "head", "<a>.attention.head_count_kv", U32, u32(3))
_metadata("huge-head-length", "attention", "<a>.attention.key_length", U32, u32(2**31))
_metadata("negative-window", "window", "<a>.attention.sliding_window", I32, struct.pack("<i", -1))
_metadata("huge-window", "window", "<a>.attention.sliding_window", U64, u64(2**63))
_metadata("context-per-layer", "context_length", "<a>.context_length", ARRAY, array(U32, [u32(8), u32(8)]))
_metadata("heads-per-layer-of-text", "head_count", "<a>.attention.head_count", ARRAY, array(STRING, [text(b"4")]))
_metadata("no-context", "context", "<a>.context_length", U32, u32(0))
_metadata("huge-context", "context", "<a>.context_length", U64, u64(2**63))
_metadata("huge-feed-forward", "feed|shape", "<a>.feed_forward_length", U32, u32(2**31))
_metadata("epsilon-of-nan", "epsilon", "<a>.attention.layer_norm_rms_epsilon", F32, f32(float("nan")))
_metadata("epsilon-of-zero", "epsilon", "<a>.attention.layer_norm_rms_epsilon", F32, f32(0.0))
_metadata("rope-base-of-infinity", "rope", "<a>.rope.freq_base", F32, f32(float("inf")))
_metadata("rope-base-of-zero", "rope", "<a>.rope.freq_base", F32, f32(0.0))
_metadata("odd-rope-width", "rope", "<a>.rope.dimension_count", U32, u32(7))
_metadata("rope-wider-than-head", "rope", "<a>.rope.dimension_count", U32, u32(254))
_metadata("unknown-rope-scaling", "rope", "<a>.rope.scaling.type", STRING, text(b"spiral"))
_metadata("experts", "expert", "<a>.expert_count", U32, u32(8))
_metadata("unknown-hyperparameter", "is not known", "<a>.attention.sideways", BOOL, b"\x01")
_metadata("vocabulary-of-another-size", "vocab", "<a>.vocab_size", U32, u32(2**31))
_metadata("vocabulary-with-too-few-tokens", "token", "tokenizer.ggml.tokens", ARRAY, array(STRING, [text(b"a"), text(b"b")]))
_metadata("vocabulary-of-numbers", "token", "tokenizer.ggml.tokens", ARRAY, array(U32, [u32(1)] * 8))
_metadata("vocabulary-of-one-string", "token", "tokenizer.ggml.tokens", STRING, text(b"abc"))
_metadata("vocabulary-of-one-number", "token", "tokenizer.ggml.tokens", U32, u32(300))
_metadata("tokenizer-of-number-array", "tokenizer", "tokenizer.ggml.model", ARRAY, array(U32, [u32(1)]))
_metadata("token-types-of-another-count", "token", "tokenizer.ggml.token_type", ARRAY, array(I32, [u32(1)] * 3))
_metadata("token-types-of-text", "token", "tokenizer.ggml.token_type", ARRAY, array(STRING, [text(b"a")]))
_metadata("merges-of-nothing", "merge", "tokenizer.ggml.merges", ARRAY, array(STRING, [text(b"nospace")]))
_metadata("merges-of-unknown-tokens", "merge", "tokenizer.ggml.merges", ARRAY, array(STRING, [text("漢 字".encode())]))
_metadata("merges-of-numbers", "merge", "tokenizer.ggml.merges", ARRAY, array(U32, [u32(1)]))
_metadata("bos-outside-the-vocabulary", "bos", "tokenizer.ggml.bos_token_id", U32, u32(2**31))
_metadata("eos-outside-the-vocabulary", "eos", "tokenizer.ggml.eos_token_id", U32, u32(2**31))
_metadata("bos-of-text", "bos", "tokenizer.ggml.bos_token_id", STRING, text(b"1"))
_metadata("unknown-tokenizer", "tokenizer", "tokenizer.ggml.model", STRING, text(b"abacus"))
_metadata("unknown-pre-tokenizer", "pre", "tokenizer.ggml.pre", STRING, text(b"abacus"))
_metadata("template-of-number", "template", "tokenizer.chat_template", U32, u32(1))
_metadata("template-with-syntax-error", "template", "tokenizer.chat_template", STRING, text(b"{% for m in %}"))
_metadata("template-that-raises", "template", "tokenizer.chat_template", STRING, text(b"{{ raise_exception('no\nway') }}"))
_metadata(
    "template-that-breaks-out", "template", "tokenizer.chat_template", STRING, text(b"{{ ''.__class__.__mro__[1].__subclasses__() }}")
)
_metadata("template-that-never-ends", "template", "tokenizer.chat_template", STRING, text(b"{% for i in range(10**12) %}x{% endfor %}"))
_metadata(
    "template-that-calls-itself", "template", "tokenizer.chat_template", STRING, text(b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
)
_metadata(
    "template-of-deep-nesting", "template", "tokenizer.chat_template", STRING, text(b"{{ " + b"(" * 20000 + b"1" + b")" * 20000 + b" }}")
)


@damage("load", "block_count")
def no_layer_count(m: Model) -> None:
    m.entries = [entry for entry in m.entries if not entry.key.endswith(b".block_count")]


@damage("load", "embedding_length")
def no_width(m: Model) -> None:
    m.entries = [entry for entry in m.entries if not entry.key.endswith(b".embedding_length")]


@damage("load", "head_count")
def no_head_count(m: Model) -> None:
    m.entries = [entry for entry in m.entries if not entry.key.endswith(b".attention.head_count")]


@damage("load", "tokenizer")
def no_tokenizer(m: Model) -> None:
    m.entries = [entry for entry in m.entries if not entry.key.startswith(b"tokenizer.")]


@damage("load", "merges")
def no_merges(m: Model) -> None:
    m.drop("tokenizer.ggml.merges")


@damage("load", "missing tensor")
def missing_tensor(m: Model) -> None:
    m.tensors = [tensor for tensor in m.tensors if tensor.name != b"blk.0.attn_k.weight"]


@damage("load", "missing tensor token_embd")
def no_tensors(m: Model) -> None:
    m.tensors = []


@damage("load", "unexpected tensor")
def unexpected_tensor(m: Model) -> None:
    m.tensors.append(replace(m.tensors[0], name=b"blk.0.surprise.weight"))


@damage("load", r"tensor blk\.0\.ffn_down\.weight has shape")
def swapped_shape(m: Model) -> None:
    tensor = m.tensor("blk.0.ffn_down.weight")
    tensor.dims = tensor.dims[::-1]


@damage("load", "shape")
def matrix_that_is_a_vector(m: Model) -> None:
    tensor = m.tensor("blk.0.attn_q.weight")
    tensor.dims = [tensor.dims[0] * tensor.dims[1]]


@damage("load", "token_embd")
def flat_embedding(m: Model) -> None:
    tensor = m.tensor("token_embd.weight")
    tensor.dims = [tensor.dims[0] * tensor.dims[1]]


def _poison(name: str, tensor: str, pattern: bytes, said: str) -> None:
    """Overwrite the first bytes of a tensor: the scale of its first block, or its first number."""

    def make(model: Model) -> bytes:
        target = model.tensor(tensor)
        target.data = pattern + target.data[len(pattern) :]
        return model.pack()

    DAMAGES[name] = Damage(name, "load", said, make)


_poison("scale-of-nan", "blk.0.attn_q.weight", b"\x00\x7e", r"blk\.0\.attn_q\.weight.*not finite")
_poison("scale-of-infinity", "blk.0.ffn_up.weight", b"\x00\x7c", r"blk\.0\.ffn_up\.weight.*not finite")
_poison("norm-of-nan", "blk.0.attn_norm.weight", f32(float("nan")), r"blk\.0\.attn_norm\.weight.*not finite")
_poison("norm-of-infinity", "output_norm.weight", f32(float("inf")), r"output_norm\.weight.*not finite")


def write_all(good: bytes, folder: Path) -> list[Path]:
    """Write every damaged form of a good file to `folder`."""
    paths = []
    for name, kind in DAMAGES.items():
        path = folder / f"{name}.gguf"
        path.write_bytes(kind.make(Model.parse(good)))
        paths.append(path)
    return paths


if __name__ == "__main__":
    write_all(Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]))
