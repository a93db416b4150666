"""Names a file by its first bytes, so that the wrong kind of file gets a helpful answer."""

_GGUF_NEEDED = "quaff reads GGUF files"

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"FUGG", "a GGUF file of the other byte order (big-endian); quaff reads little-endian files"),
    (b"tjgg", f"a GGJT file, a format before GGUF; {_GGUF_NEEDED}: convert the original model again"),
    (b"lmgg", f"a GGML file, a format before GGUF; {_GGUF_NEEDED}: convert the original model again"),
    (b"fmgg", f"a GGMF file, a format before GGUF; {_GGUF_NEEDED}: convert the original model again"),
    (b"PK\x03\x04", f"a zip archive (PyTorch checkpoints and Python wheels are zip archives too); {_GGUF_NEEDED}"),
    (b"\x80\x02", f"a Python pickle, probably an old PyTorch checkpoint; {_GGUF_NEEDED}"),
    (b"\x89HDF", f"an HDF5 file; {_GGUF_NEEDED}"),
    (b"\x1f\x8b", f"a gzip archive; unpack it: {_GGUF_NEEDED}"),
    (b"\x28\xb5\x2f\xfd", f"a Zstandard archive; unpack it: {_GGUF_NEEDED}"),
    (b"version https://git-lfs", "a Git LFS pointer, not the model itself; run 'git lfs pull' where it came from"),
    (b"<!doctype html", "a web page, not a model: the download link was probably not the file's own"),
    (b"<html", "a web page, not a model: the download link was probably not the file's own"),
)


def describe(head: bytes, file_bytes: int) -> str:
    """What a file that is not GGUF seems to be. `head`: its first 64 bytes or fewer."""
    lowered = head.lstrip().lower()
    for signature, text in _SIGNATURES:
        if head.startswith(signature) or lowered.startswith(signature):
            return text
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= file_bytes - 8:
        return "a safetensors file; give the folder that it is in, with its config.json and tokenizer.json"
    if not any(head):
        return f"not a model: it begins with zeros, as an unfinished download does; {_GGUF_NEEDED}"
    return f"not a GGUF file (it begins with {head[:4].hex(' ')}, not 47 47 55 46); {_GGUF_NEEDED}"
