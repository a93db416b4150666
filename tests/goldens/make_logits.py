"""Make the logits goldens: transformers in float32 on the dequantised weights of a GGUF file.

Nothing of quaff takes part: weights come from `gguf.quants.dequantize`, the model from transformers (eager attention, float32), the token
ids from llama.cpp by way of `perplexity/NAME.json`. Needs torch, transformers and gguf, which the test run does not.

    python tests/goldens/make_logits.py smollm2 path/to/SmolLM2-135M-Instruct.Q4_1.gguf
    python tests/goldens/make_logits.py gemma3 path/to/gemma-3-270m-q4_k_m.gguf
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
PROMPT_TOKENS = 700  # longer than Gemma's window of 512, so that the window and the pages it leaves behind matter
ROWS = 32
VOCAB_IDS = 1024
TOP = 20


def field(reader: GGUFReader, key: str, default: Any = None) -> Any:
    found = reader.get_field(key)
    if found is None and default is None:
        raise SystemExit(f"the file has no {key}")
    return default if found is None else found.contents()


def weights_of(reader: GGUFReader) -> dict[str, NDArray[np.float32]]:
    return {t.name: dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}


def halves_from_pairs(w: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's row order of Q and K: rows (2i, 2i+1) of a head turn together there, rows (i, i + dim/2) in transformers."""
    dim = w.shape[0] // heads
    return w.reshape(heads, dim // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def load_llama(reader: GGUFReader) -> torch.nn.Module:
    w = weights_of(reader)
    heads, kv_heads = field(reader, "llama.attention.head_count"), field(reader, "llama.attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=w["token_embd.weight"].shape[0],
        hidden_size=field(reader, "llama.embedding_length"),
        intermediate_size=field(reader, "llama.feed_forward_length"),
        num_hidden_layers=field(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=float(field(reader, "llama.attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": float(field(reader, "llama.rope.freq_base"))},
        max_position_embeddings=field(reader, "llama.context_length"),
        tie_word_embeddings="output.weight" not in w,
        attention_bias=False,
    )
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(config.num_hidden_layers):
        for part, count in (("attn_q", heads), ("attn_k", kv_heads)):
            name = f"blk.{layer}.{part}.weight"
            w[name] = halves_from_pairs(w[name], count)
    return fill(LlamaForCausalLM, config, w, names)


def load_gemma3(reader: GGUFReader) -> torch.nn.Module:
    # The file stores norm weights as 1 + w, transformers adds the 1 itself.
    w = {name: value - 1 if name.endswith("norm.weight") else value for name, value in weights_of(reader).items()}
    config = Gemma3TextConfig(
        vocab_size=w["token_embd.weight"].shape[0],
        hidden_size=field(reader, "gemma3.embedding_length"),
        intermediate_size=field(reader, "gemma3.feed_forward_length"),
        num_hidden_layers=field(reader, "gemma3.block_count"),
        num_attention_heads=field(reader, "gemma3.attention.head_count"),
        num_key_value_heads=field(reader, "gemma3.attention.head_count_kv"),
        head_dim=field(reader, "gemma3.attention.key_length"),
        rms_norm_eps=float(field(reader, "gemma3.attention.layer_norm_rms_epsilon")),
        query_pre_attn_scalar=256,
        sliding_window=field(reader, "gemma3.attention.sliding_window"),
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": float(field(reader, "gemma3.rope.freq_base"))},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        max_position_embeddings=field(reader, "gemma3.context_length"),
        tie_word_embeddings=True,
    )
    layers = config.num_hidden_layers
    assert config.layer_types == ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    return fill(Gemma3ForCausalLM, config, w, names)


def fill(kind: Any, config: Any, w: dict[str, NDArray[np.float32]], names: dict[str, str]) -> torch.nn.Module:
    """Build the model and copy every tensor into it; a tensor without a place or a parameter without a tensor is an error."""
    config._attn_implementation = "eager"
    state = {
        "model.embed_tokens.weight": w.pop("token_embd.weight"),
        "model.norm.weight": w.pop("output_norm.weight"),
    }
    state["lm_head.weight"] = w.pop("output.weight", state["model.embed_tokens.weight"])
    for layer in range(config.num_hidden_layers):
        for ours, theirs in names.items():
            state[f"model.layers.{layer}.{theirs}.weight"] = w.pop(f"blk.{layer}.{ours}.weight")
    if w:
        raise SystemExit(f"tensors without a place in the model: {sorted(w)}")
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in kind(config).state_dict().items()}
    if shapes != {name: value.shape for name, value in state.items()}:
        raise SystemExit("the file's tensors do not match the model's parameters")
    model = kind(config).to(torch.float32).eval()
    model.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in state.items()}, strict=True)
    return model


LOADERS = {"llama": load_llama, "gemma3": load_gemma3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="golden to write: logits/NAME.npz; perplexity/NAME.json holds the token ids")
    parser.add_argument("model", type=Path, help="GGUF file")
    args = parser.parse_args()

    tokens = json.loads((HERE / "perplexity" / f"{args.name}.json").read_text())["tokens"][:PROMPT_TOKENS]
    reader = GGUFReader(args.model)
    model = LOADERS[field(reader, "general.architecture")](reader)
    # The first row, and every 23rd back from the last: no two at the same offset in a page of 64, and rows on both sides of Gemma's window.
    rows = np.concatenate([[0], (len(tokens) - 1 - 23 * np.arange(ROWS - 1))[::-1]])
    with torch.inference_mode():
        hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, torch.from_numpy(rows)]
        logits = model.lm_head(hidden).numpy()
    # Fixed by PCG64 and the seed; committed in the golden as well, so a change of NumPy's generator cannot matter.
    ids = np.sort(np.random.Generator(np.random.PCG64(20240)).permutation(logits.shape[1])[:VOCAB_IDS]).astype(np.int32)
    top = np.argsort(-logits, axis=1, kind="stable")[:, :TOP].astype(np.int32)
    out = HERE / "logits" / f"{args.name}.npz"
    out.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        out,
        tokens=np.asarray(tokens, np.int32),
        rows=rows.astype(np.int32),
        ids=ids,
        logits=logits[:, ids].astype(np.float32),
        top_ids=top,
        top_logits=np.take_along_axis(logits, top, axis=1).astype(np.float32),
        model_sha256=hashlib.sha256(args.model.read_bytes()).hexdigest(),
        made_with=f"torch {torch.__version__}, transformers {transformers.__version__}, float32, eager attention",
    )
    print(f"{out}: {out.stat().st_size} bytes, prompt of {len(tokens)} tokens, rows {rows.tolist()}")
    print("top-1 of the last row:", top[-1, 0], "logit", logits[-1, top[-1, 0]])


if __name__ == "__main__":
    main()
