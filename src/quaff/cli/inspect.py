"""`quaff inspect`: what a model file holds and what it needs, without loading it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quaff.cli.console import Bar, note, print_json
from quaff.cli.options import Json, Model, Quantize

if TYPE_CHECKING:
    from quaff.checkpoint import Checkpoint


Check = Annotated[bool, typer.Option("--check", help="Read all of a packed file and compare its weights with their hashes.")]


def inspect(model: Model, quantize: Quantize = None, check: Check = False, as_json: Json = False) -> None:
    """Show what a model holds: family, tensor types, sizes, memory needed."""
    from quaff.checkpoint.hashes import check_hashes
    from quaff.errors import ConfigError, located
    from quaff.hub import resolve
    from quaff.models.huggingface import open_model

    with Bar(unit="bytes") as bar:
        path = resolve(model, bar.step)
        with open_model(path, quantize) as checkpoint:
            if check:
                if checkpoint.origin is None:
                    raise ConfigError(f"{path}: --check compares with the hashes of a packed file, and this is none")
                with located(path):
                    check_hashes(checkpoint.tensors, lambda done, total: bar.step("checking", done, total))
            report = describe(checkpoint)
    if as_json:
        print_json(report)
        return
    print_report(report)


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The report of one file as JSON values. A model we cannot run is described as far as its file can be read, with the reason."""
    from quaff.errors import QuaffError
    from quaff.graph.builder import build_graph
    from quaff.measure.memory import memory_need, parameters
    from quaff.models import read_model

    tensors = {name: (view.shape, view.ggml_type) for name, view in checkpoint.tensors.items()}
    counts, sizes = Counter[str](), Counter[str]()
    for view in checkpoint.tensors.values():
        counts[view.type_name] += 1
        sizes[view.type_name] += view.nbytes
    metadata, origin = checkpoint.metadata, checkpoint.origin

    def known(key: str, kind: type[Any]) -> Any:
        """The value of a key, or None when it is missing or of another kind than it should be."""
        value = metadata.get(key)
        return value if isinstance(value, kind) and not (kind is int and isinstance(value, bool)) else None

    report: dict[str, Any] = {
        "path": str(checkpoint.path),
        "file_bytes": checkpoint.file_bytes,
        "format": checkpoint.format,
        "quantized": checkpoint.quantized,
        "packed_from": None if origin is None else {"name": origin.name, "format": origin.format, "file_bytes": origin.nbytes},
        "architecture": checkpoint.architecture,
        "name": known("general.name", str),
        "supported": True,
        "reason": None,
        "parameters": parameters(tensors),
        "tensor_types": {kind: {"tensors": counts[kind], "bytes": sizes[kind]} for kind in sorted(sizes, key=lambda k: -sizes[k])},
        "context_length": known(f"{checkpoint.architecture}.context_length", int),
        "layers": known(f"{checkpoint.architecture}.block_count", int),
        "tokenizer": {"model": known("tokenizer.ggml.model", str), "pre": known("tokenizer.ggml.pre", str)},
        "vocabulary": len(known("tokenizer.ggml.tokens", list) or ()),
        "chat_template": known("tokenizer.chat_template", str) is not None,
        "memory": None,
    }
    try:
        opened = read_model(checkpoint)
        graph = build_graph(opened.config, opened.family, opened.tensors)
        report["memory"] = memory_need(graph, tensors).as_dict()
    except QuaffError as error:
        report["supported"], report["reason"] = False, str(error)
    return report


def print_report(report: dict[str, Any]) -> None:
    from quaff.errors import one_line
    from quaff.weights.budget import human_bytes

    def row(label: str, text: str) -> None:
        print(f"{label:<16}{one_line(text)}")

    row("file", f"{report['path']} ({human_bytes(report['file_bytes'])})")
    if report["packed_from"]:
        origin = report["packed_from"]
        row("format", f"packed from {origin['name']} ({origin['format']}{', ' + report['quantized'] if report['quantized'] else ''})")
    elif report["quantized"]:
        matrices = "matrices as stored" if report["quantized"] == "none" else f"matrices become {report['quantized']} on load"
        row("format", f"{report['format']}, {matrices}")
    row("family", report["architecture"] + ("" if report["supported"] else "  (not supported)"))
    if report["name"]:
        row("name", report["name"])
    row("parameters", f"{report['parameters']:,}")
    row("layers", str(report["layers"] if report["layers"] is not None else "not stated"))
    row("context", f"{report['context_length']:,} tokens" if report["context_length"] is not None else "not stated")
    tokenizer = report["tokenizer"]
    row("tokenizer", f"{tokenizer['model'] or 'none'} {tokenizer['pre'] or ''}, {report['vocabulary']:,} tokens".replace(" ,", ","))
    row("chat template", "yes" if report["chat_template"] else "no")
    for i, (kind, held) in enumerate(report["tensor_types"].items()):
        row("" if i else "tensors", f"{kind:<7}{held['tensors']:>5} tensors {human_bytes(held['bytes']):>11}")
    need = report["memory"]
    if need:
        row("memory", f"weights {human_bytes(need['weight_bytes'])}, KV {human_bytes(need['kv_bytes_per_1024_tokens'])} per 1,024 tokens,")
        row("", f"scratch {human_bytes(need['scratch_bytes'])} for {need['rows']:,} rows in chunks of {need['chunk']}")
    else:
        note(f"not supported: {report['reason']}")
