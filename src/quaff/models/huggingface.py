"""A Hugging Face folder (config.json, safetensors, tokenizer.json) becomes the checkpoint that a GGUF file of the same model would give."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quaff.checkpoint import GGML_TYPES, Checkpoint, TensorView, open_checkpoint
from quaff.checkpoint.safetensors import StoredTensor, TensorFolder, parse_json, read_object, read_tensors, read_text
from quaff.config import QUANTIZE, Quantize
from quaff.errors import CheckpointError, ConfigError, UnsupportedError, located, quote
from quaff.models import FAMILIES
from quaff.models.family import BF16_TYPE, F16_TYPE, F32_TYPE, Family, Imported
from quaff.models.metadata import MetadataReader
from quaff.tokenizer.huggingface import tokenizer_metadata

Bytes = NDArray[np.uint8]

TYPE_IDS = {t.name: t.id for t in GGML_TYPES.values()}
FLOATS = {"F32": F32_TYPE, "F16": F16_TYPE, "BF16": BF16_TYPE}
BLOCK_VALUES = 1 << 20
# Routers decide by small differences, short convolutions are a few values a channel: both stay F32, as llama.cpp's converter keeps them.
KEPT_FLOAT = re.compile(r".*\.(ffn_gate_inp|ffn_gate_inp_shexp|ssm_conv1d\w*|shortconv\.conv)\.weight")
# Parts of multimodal models that see and hear: the language model is read alone.
OTHER_SENSES = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_vision|embed_audio|vision_embedder)\."
)


def open_model(path: str | os.PathLike[str], quantize: Quantize | None = None) -> Checkpoint:
    """Open a GGUF or packed file, or a Hugging Face folder whose matrices become `quantize` (None: q8_0) as they are read.

    Raises CheckpointError and UnsupportedError as `open_checkpoint` does, ConfigError for `quantize` with a file.
    """
    path = Path(path)
    if quantize is not None and quantize not in QUANTIZE:
        raise ConfigError(f"quantize is {quantize!r}; expected one of {', '.join(QUANTIZE)}")
    if path.is_dir() and ((path / "config.json").exists() or not any(path.glob("*.gguf"))):
        return open_folder(path, quantize or "q8_0")
    if quantize is not None:
        raise ConfigError(f"{path}: a file is taken as it is; quantize is for Hugging Face folders")
    return open_checkpoint(path)


def open_folder(folder: Path, matrices: str) -> Checkpoint:
    """The folder as a checkpoint in GGUF names and keys. `matrices`: what those of a fitting width become: q8_0, q4_0, q4_1, f16, f32, or
    "none" for the type they are stored in. Vectors, routers and short convolutions are F32.

    Strict both ways: a tensor that no family's mapping uses or ignores, and one that a mapping needs and the folder lacks, raise.
    """
    with located(folder):
        if not (folder / "config.json").exists():
            raise CheckpointError("is a folder, but config.json is missing; give a GGUF file, or the folder of a Hugging Face model")
        whole = read_object(folder / "config.json")
        config = _language(whole)
        family = _family(config)
        with _opened(folder) as stored:
            tensors = stored.tensors if config is whole else _language_names(stored.tensors)
            metadata, views = _translated(config, family, tensors, matrices)
            metadata["general.name"] = _name(folder.resolve())
            tokens = views["token_embd.weight"].shape[0] if "token_embd.weight" in views else 0
            metadata |= _tokenizer(folder, config, tokens)
            return Checkpoint(folder, metadata, views, stored.files, "safetensors", matrices)


def _name(folder: Path) -> str:
    """The folder's name; in the cache of huggingface_hub (models--owner--name/snapshots/commit) the repository's."""
    return folder.parents[1].name.rpartition("--")[2] if folder.parent.name == "snapshots" else folder.name


def _language(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a multimodal model's language model, `text_config`; of any other model, its own."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    shared = ("tie_word_embeddings", "bos_token_id", "eos_token_id")
    return {key: value for key, value in config.items() if key in shared} | text


def _language_names(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a language model by the names it has alone; those of other senses are left out."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if not OTHER_SENSES.match(name):
            inner = re.sub(r"^(?:model\.language_model|language_model\.model)\.", "model.", name)
            found[inner.removeprefix("language_model.")] = tensor
    return found


@contextmanager
def _opened(folder: Path) -> Iterator[TensorFolder]:
    """The folder's tensors; their files are closed again when what follows fails."""
    stored = read_tensors(folder)
    try:
        yield stored
    except BaseException:
        stored.close()
        raise


def _family(config: Mapping[str, Any]) -> Family:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no model_type: it is not the configuration of a model")
    known: dict[str, Family] = {name: f for f in FAMILIES.values() if f.huggingface for name in f.huggingface.model_types}
    if model_type not in known:
        raise UnsupportedError(
            f"a Hugging Face folder of model_type {quote(model_type)} is not supported; supported: {', '.join(sorted(known))}"
        )
    return known[model_type]


def _translated(
    config: Mapping[str, Any], family: Family, tensors: Mapping[str, StoredTensor], matrices: str
) -> tuple[dict[str, Any], dict[str, TensorView]]:
    """Metadata and tensors, without the tokenizer."""
    mapping = family.huggingface
    assert mapping is not None
    try:
        metadata = {key: _value(value) for key, value in mapping.metadata(config).items()}
        MetadataReader(metadata, family.name).layers()  # bounds what is listed next
        wanted = list(mapping.tensors(config))
    except KeyError as error:
        raise CheckpointError(f"config.json has no {quote(str(error.args[0]))}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"config.json holds a value of the wrong kind: {error}") from None
    ignored = list(mapping.ignored)
    if config.get("tie_word_embeddings") is True:
        ignored.append(r"lm_head\.weight")
        wanted = [item for item in wanted if item.sources != ("lm_head.weight",)]
    items = _matched(wanted, tensors, ignored, family.name)
    shapes = {item.name: (tensors[item.sources[0]].shape if item.make is None else (), F32_TYPE) for item in items}
    # Shapes of tensors that are made come from the family's table; it needs those that are taken as they are.
    model = family.config(metadata, shapes)
    table = {spec.name: spec.shape for spec in family.table(model)}
    views: dict[str, TensorView] = {}
    for item in items:
        sources = [tensors[name] for name in item.sources]
        shape = sources[0].shape if item.make is None else table.get(item.name)
        if shape is None:
            raise CheckpointError(f"unexpected tensor {quote(_origin(item))} in a {family.name} model")
        views[item.name] = _view(item, shape, sources, matrices)
    there = family.split(model, views)
    # Without a head of its own a model uses the embedding, unless its configuration says otherwise.
    untied = config.get("tie_word_embeddings") is False
    for spec in family.table(model):
        if spec.name not in there and (not spec.optional or (untied and spec.name == "output.weight")):
            source = next((quote(item.sources[0]) for item in wanted if item.name == spec.name), "its source")
            raise CheckpointError(f"missing tensor {source}, which is {spec.name} of a {family.name} model")
    family.check(model, {name: (view.shape, view.ggml_type) for name, view in there.items()})
    return metadata, views


def _value(value: Any) -> Any:
    """As a GGUF file would keep it: numbers in 32 bits, lists of them as arrays."""
    if isinstance(value, float):
        return float(np.float32(value))
    if isinstance(value, list | tuple) and value and not isinstance(value[0], str):
        array = np.array(value)
        return array.astype(np.float32 if array.dtype.kind == "f" else array.dtype if array.dtype.kind == "b" else np.int32)
    return list(value) if isinstance(value, tuple) else value


def _matched(wanted: Sequence[Imported], stored: Mapping[str, StoredTensor], ignored: Sequence[str], name: str) -> list[Imported]:
    """Those of `wanted` that the folder holds. CheckpointError for a tensor that is left over, or where only some sources are there."""
    found: list[Imported] = []
    used: set[str] = set()
    for item in wanted:
        missing = [source for source in item.sources if source not in stored]
        if item.sources and len(missing) == len(item.sources):
            continue
        if missing:
            raise CheckpointError(f"missing tensor {quote(missing[0])}, which {item.name} is made of in a {name} model")
        found.append(item)
        used.update(item.sources)
    for source in stored:
        if source not in used and not any(re.fullmatch(pattern, source) for pattern in ignored):
            raise CheckpointError(f"unexpected tensor {quote(source)} in a {name} model")
    return found


def _origin(item: Imported) -> str:
    """What to call a tensor in an error: its name in the folder, where it has one."""
    return item.sources[0] if item.sources else item.name


def _view(item: Imported, shape: tuple[int, ...], sources: Sequence[StoredTensor], matrices: str) -> TensorView:
    for source in sources:
        if source.dtype not in FLOATS and not (source.dtype == "U8" and item.make is not None):
            raise CheckpointError(f"tensor {quote(source.name)} has dtype {source.dtype}; supported: BF16, F16, F32")
    if not shape or 0 in shape or len(shape) > 4:
        raise CheckpointError(f"tensor {quote(_origin(item))} has shape {shape}; expected one to four sizes above zero")
    stored = {source.dtype for source in sources}
    kind = stored.pop() if len(stored) == 1 and stored <= FLOATS.keys() else "F32"
    if len(shape) == 1 or item.name.endswith(".bias") or KEPT_FLOAT.fullmatch(item.name):
        kind = "F32"
    elif matrices != "none" and shape[-1] % GGML_TYPES[TYPE_IDS[matrices.upper()]].block == 0:
        kind = matrices.upper()
    form = GGML_TYPES[TYPE_IDS[kind]]
    values = prod(shape)
    nbytes = values // form.block * form.nbytes
    if item.make is None and sources[0].dtype == kind:
        rows = values // shape[-1] if len(shape) > 1 else 1
        place = replace(sources[0].place, count=rows, nbytes=nbytes // rows, stride=nbytes // rows)
        return TensorView(item.name, shape, form.id, kind, nbytes, place)
    # The result, a block of rows as it is stored and as f32 with the quantiser's copies of it, and what `make` takes and gives.
    scratch = nbytes + 4 * 7 * min(values, max(BLOCK_VALUES, shape[-1]))
    if item.make is not None:
        scratch += 4 * values + sum(s.place.nbytes + 4 * prod(s.shape) * (s.dtype != "F32") for s in sources)
    return TensorView(item.name, shape, form.id, kind, nbytes, partial(_made_bytes, item, shape, sources, kind, nbytes), scratch)


def _made_bytes(item: Imported, shape: tuple[int, ...], sources: Sequence[StoredTensor], kind: str, nbytes: int) -> Bytes:
    """The tensor in blocks of type `kind`, written block of rows by block of rows."""
    block: Callable[[int, int], NDArray[np.float32]]
    if item.make is None:
        block = partial(_values, sources[0])
    else:
        made = item.make(*(_whole(source) for source in sources))
        if made.shape != shape or made.dtype != np.float32:
            raise CheckpointError(f"{item.name}, made of {quote(_origin(item))}, has shape {made.shape}; expected {shape}")
        flat = np.ascontiguousarray(made).reshape(-1)
        block = partial(_slice, flat)
    out = np.empty(nbytes, np.uint8)
    width, values = shape[-1], prod(shape)
    step = max(1, BLOCK_VALUES // width) * width
    for begin in range(0, values, step):
        end = min(begin + step, values)
        out[nbytes * begin // values : nbytes * end // values] = _encoded(block(begin, end).reshape(-1, width), kind, item.name)
    out.flags.writeable = False
    return out


def _slice(flat: NDArray[np.float32], begin: int, end: int) -> NDArray[np.float32]:
    return flat[begin:end]


def _whole(source: StoredTensor) -> NDArray[Any]:
    """All values as f32 in the tensor's shape; those of dtype U8 as they are."""
    values = source.place.read() if source.dtype == "U8" else _values(source, 0, prod(source.shape))
    return values.reshape(source.shape)


def _values(source: StoredTensor, begin: int, end: int) -> NDArray[np.float32]:
    """Values begin .. end - 1 in row-major order, exactly, as f32."""
    if source.dtype == "F32":
        return source.read(4 * begin, 4 * end).view(np.float32)
    raw = source.read(2 * begin, 2 * end)
    if source.dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _encoded(values: NDArray[np.float32], kind: str, name: str) -> Bytes:
    """Rows of f32 values in blocks of `kind`, by the quantisers of the `gguf` package."""
    import gguf

    if not np.isfinite(values).all():
        raise CheckpointError(f"tensor {quote(name)} holds a value that is not finite; the file is damaged")
    if kind == "F16" and np.abs(values).max() >= 65520:
        raise CheckpointError(f"tensor {quote(name)} holds a value that F16 cannot")
    blocks: NDArray[Any] = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return np.ascontiguousarray(blocks).view(np.uint8).reshape(-1)


def _tokenizer(folder: Path, config: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """`tokenizer.*` keys from the files beside the tensors."""
    path = folder / "tokenizer.json"
    if not path.exists():
        model = " (a SentencePiece model alone is not enough)" if (folder / "tokenizer.model").exists() else ""
        raise CheckpointError(f"tokenizer.json is missing{model}")
    text = read_text(path)
    parse_json(text, path.name)  # for its errors: the library's own say less
    optional = [folder / name for name in ("tokenizer_config.json", "generation_config.json")]
    settings, generation = [read_object(file) if file.exists() else {} for file in optional]
    template = folder / "chat_template.jinja"
    return tokenizer_metadata(text, settings, [generation, config], read_text(template) if template.exists() else None, tokens)
