"""Make the token goldens: ids of llama.cpp, by way of the `xllamacpp` wheel, for texts that tokenizers get wrong.

    python tests/goldens/tokens/make_tokens.py

Writes, beside this file:
- smollm2.json, gemma3.json: the corpus through the vocabularies of both real models, special tokens added or not, parsed or not
- pre_tokenizers.json: every kind of pre-tokenizer, as a tiny model with SmolLM2's vocabulary
- score_ties.json: a small SentencePiece vocabulary whose scores are often equal, with and without the space prefix

Needs xllamacpp, gguf and numpy; the test run needs none of the first.
"""

from __future__ import annotations

import json
import random
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from quaff import hub
from quaff.checkpoint import open_checkpoint
from quaff.tokenizer.pretokenizers import PRE_TOKENIZERS

HERE = Path(__file__).parent

CORPUS = {
    "empty": "",
    "english": "The quick brown fox doesn't jump; it's we'll, they've, I'M and YOU'RE. \u201cQuoted\u201d \u2014 "
    "na\u00efve caf\u00e9s, co-op's.",
    "python": 'def f(x: int) -> str:\n    """Doc."""\n\tif x >= 10**9:\n        return f"{x!r:>{8}}"  # comment\n\n\nclass A_b1(C): pass\n',
    "c": '#include <stdio.h>\r\nint main(void) {\r\n\tfor (int i=0;i<0xFF;++i) printf("%d\\n", a[i]->b);\r\n\treturn 0;\r\n}\r\n',
    "json": '{"a":[1,2.5e-10,null,true],"\u00fc\\u00fc":"\\ud83d\\ude00","nested":{"k":[[],{}]}}',
    "html": '<table><tr><td class="x">1</td></tr></table><br/><s>struck</s> &amp; <strong>b</strong></s><!-- --><unused7>',
    "chinese": "\u4e2d\u6587\u6d4b\u8bd5\uff1a\u201c\u4f60\u597d\uff0c\u4e16\u754c\u201d"
    "\u3002\u5171\u6709\uff11\uff12\uff13\u4e2a\u5b57\u2026\u2026\u7e41\u9ad4\u5b57",
    "japanese": "\u30ab\u30bf\u30ab\u30ca\u3068\u3072\u3089\u304c\u306a\u3001\u6f22\u5b57\u3002\uff76\uff9e\u3000\u5168\u89d2",
    "korean": "\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4. \u1112\u1161\u11ab (\uc790\ubaa8)",
    "arabic": "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\u060c "
    "\u0643\u064e\u062a\u064e\u0628\u064e \u0661\u0662\u0663 \u202bRTL\u202c",
    "hebrew": "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd \u05e2\u05d5\u05dc\u05dd",
    "hindi": "\u0939\u093f\u0928\u094d\u0926\u0940 \u0915\u094d\u0937\u0924\u094d\u0930\u093f\u092f\u0964 \u0967\u0968\u0969",
    "thai": "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01 \u0e51\u0e52\u0e53",
    "russian": "\u0421\u044a\u0435\u0448\u044c \u0435\u0449\u0451 \u044d\u0442\u0438\u0445 \u0431\u0443\u043b\u043e\u043a!",
    "emoji": "\U0001f600\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 "
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7"
    " \u2764\ufe0f 1\ufe0f\u20e3 \U0001f3f4\U000e0067\U000e0062\U000e007f \U0001fae0",
    "combining": "e\u0301 \u00e9 A\u030a\u0323 \u0301x z\u0351\u036b\u0343 \u0041\u0308\ufb01\u01c5\u00df\u0130",
    "spaces": " a  b   c    d     \t e\u00a0f\u00a0\u00a0g\u2003h\u3000i\u200bj\u2028k\u2029l\u0085m\u202fn\ufeffo ",
    "leading spaces": "     five",
    "only spaces": "       ",
    "one space": " ",
    "newlines": "a\nb\n\nc\n\n\nd\r\ne\r\n\r\nf\rg \n h\n \n \n\n "
    "i\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\nj\n",
    "tabs": "\t\t\tif\t\tx\n\t\n\t\t\n" + "\t" * 40 + "end",
    "many spaces": "x" + " " * 33 + "y" + " " * 64 + "\n" + " " * 17,
    "control": "a\x00b\x01\x02c\x07\x08\x0b\x0c\x1b[31mred\x1b[0m\x7f\x80\x9fz\ufffd\uffff\U0010ffff",
    "numbers": "0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 1e-5 0x1F \u00bd\u2167\u00b2\u0664 12ab34",
    "punctuation": "!!! ... ?! --- === ~~~ $5 +1 ^_^ |x| `code` @user #tag ((())) [[]] {{}} \\\\ // <> ;:' \" %% && ** "
    "\u00bf\u00a1\u2026\u2014",
    "long word": "Donaudampfschifffahrtselektrizit\u00e4tenhauptbetriebswerkbauunterbeamtengesellschaft" + "ab" * 150,
    "repeated": "a" * 300 + "banana" * 20 + "\u4e2d" * 50 + "." * 70 + "=-" * 40,
    "base64": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAUAAAAFCAYAAACNbyblAAAAHElEQVQI12P4//8/w38GIAXDIBKE0DHxgljN"
    "BAAO9TXL0Y4OHwAAAABJRU5ErkJggg==",
    "url": "https://example.com/a_b/%7Ec?q=1&r=\u00fc#frag user.name+tag@mail.example",
    "mixed": "Hello\u4e16\u754c123\u0645\u0631\u062d\u0628\u0627\U0001f600abc\u0434\u0435\u0444 _x9 iPhone15Pro "
    "\u03b1\u03b2\u03b3\u2260\u2211 na\u0308ive",
    "new letters": "a\U00013460b \ua7cb\ua7da \U00016100\U000105c0",
    "private": "\ue000\uf8ff \U000f0000 \u0378 \U000e0001",
    "special tokens": "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><bos><eos> <start_of_turn>model\n<end_of_turn></s><s><unk><pad>"
    "<|im_start|<|im_end|>> <reponame> <file_sep>[multimodal]<mask> <0x0A> <unused0><unused6241>",
    "special runs": "<|im_end|><|im_end|> <|im_end|>\n\n<|im_end|>  <end_of_turn><end_of_turn>\n<end_of_turn> ",
    "escaped space": "a\u2581b \u2581\u2581 \u2581c \u0120d\u010a",
    "contractions": "'s 'S 'll 'LL 're'Ve'D's x's'' ''t 'x d'\u00e9 it\u2019s",
}


class Peer:
    """llama.cpp's tokenizer, reached over the small server that the wheel brings along."""

    def __init__(self, path: Path) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 64, 1, False, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        self._server = xllamacpp.Server(params)

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        body = json.dumps({"content": text, "add_special": add_special, "parse_special": parse_special}).encode()
        request = urllib.request.Request(f"{self._server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            ids: list[int] = json.load(reply)["tokens"]
        return ids


def write_tiny(path: Path, metadata: dict[str, Any]) -> None:
    """A one-layer model of zeros with the given tokenizer: just enough for llama.cpp to load."""
    writer = GGUFWriter(path, "llama")
    dim, tokens = 32, metadata["tokenizer.ggml.tokens"]
    for key, value in {"context_length": 64, "embedding_length": dim, "block_count": 1, "feed_forward_length": dim}.items():
        writer.add_uint32(f"llama.{key}", value)
    for key, value in {"attention.head_count": 2, "attention.head_count_kv": 2, "rope.dimension_count": dim // 2}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    square = np.zeros((dim, dim), np.float16)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), dim), np.float16))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(dim, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pre_tokenizer_metadata(smollm2: dict[str, Any], name: str) -> dict[str, Any]:
    """SmolLM2's vocabulary under another pre-tokenizer; BOS by that pre-tokenizer's default."""
    kept = ("tokens", "token_type", "merges", "bos_token_id", "eos_token_id")
    metadata = {f"tokenizer.ggml.{key}": smollm2[f"tokenizer.ggml.{key}"] for key in kept}
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, **metadata}


def score_ties_metadata(space_prefix: bool) -> dict[str, Any]:
    """Random words over four letters with a dozen different scores: nearly every merge is decided by position."""
    rng = random.Random(3)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"ab\u2581c\n", "<sp>", "[u]"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 5, 3, 4]
    while len(tokens) < 640:
        word = "".join(rng.choice("ab\u2581c") for _ in range(rng.randrange(2, 7)))
        if word not in tokens:
            tokens.append(word)
            kinds.append(1)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [-float(rng.randrange(12)) if kind == 1 else 0.0 for kind in kinds],
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


def score_ties_texts() -> list[str]:
    rng = random.Random(4)
    parts = ["a", "b", " ", "c", "ab", "aa", "  ", "\u00e9", "\n", "<sp>", "[u]", "</s>", "<unk>", "abcabcabc", "aaaaaaaaaaa"]
    return ["".join(rng.choice(parts) for _ in range(rng.randrange(14))) for _ in range(150)]


def as_lists(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in metadata.items()}


def write_lines(path: Path, entries: list[Any]) -> None:
    """A JSON array with one entry per line, so that a change shows in a diff."""
    lines = ",\n".join(json.dumps(entry, ensure_ascii=True, separators=(",", ":")) for entry in entries)
    path.write_text(f"[\n{lines}\n]\n")


def main() -> None:
    for name in ("smollm2", "gemma3"):
        peer = Peer(hub.resolve(name))
        write_lines(
            HERE / f"{name}.json",
            [
                {"text": text, "name": label, "add_special": add, "parse_special": parse, "ids": peer.encode(text, add, parse)}
                for label, text in CORPUS.items()
                for add, parse in ((True, False), (False, True))
            ],
        )
    with open_checkpoint(hub.resolve("smollm2")) as checkpoint:
        smollm2 = as_lists(dict(checkpoint.metadata))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        entries: list[Any] = []
        for rule in dict.fromkeys(PRE_TOKENIZERS.values()):
            name = next(known for known, other in PRE_TOKENIZERS.items() if other == rule)
            write_tiny(path, pre_tokenizer_metadata(smollm2, name))
            peer = Peer(path)
            labels = [
                label for label in CORPUS if label not in ("repeated", "long word", "base64", "many spaces", "special tokens", "html")
            ]
            entries.append({"pre": name, "ids": {label: peer.encode(CORPUS[label], True, False) for label in labels}})
        write_lines(HERE / "pre_tokenizers.json", entries)
        ties: list[Any] = []
        for space_prefix in (True, False):
            metadata = score_ties_metadata(space_prefix)
            write_tiny(path, metadata)
            peer = Peer(path)
            for index, text in enumerate(score_ties_texts()):
                add, parse = index % 2 == 0, index % 3 == 0
                ids = peer.encode(text, add, parse)
                ties.append({"text": text, "space_prefix": space_prefix, "add_special": add, "parse_special": parse, "ids": ids})
        write_lines(HERE / "score_ties.json", ties)


if __name__ == "__main__":
    main()
