"""A GGUF file of a Llama model, written out as a normal Hugging Face model folder.

Purpose: a package registry that ships a small model as GGUF can stand in for a model hub. The folder holds dequantised
weights in bfloat16 (`model.safetensors`), `config.json`, `generation_config.json` and a fast tokenizer that gives the
GGUF's own token ids.

Invariant: every tensor and every token of the GGUF is used, by name; one that is not known is an error, never skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harvest.errors import ModelError

if TYPE_CHECKING:
    import gguf
    import numpy as np
    import torch

_TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSOR_NAMES = {
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
_CONTROL_TOKEN = 3  # GGUF's token type for special tokens; 1 is a normal one


def write_model_folder(gguf_path: Path, folder: Path) -> None:
    """Write the Llama model of one GGUF file into an existing, empty folder.

    Raises ModelError when the file is no GGUF, or is of an architecture, tokenizer or tensor set this does not know.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(gguf_path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:
        raise ModelError(f"{gguf_path} cannot be read as a GGUF file: {error}. Delete it and get it again.") from error
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{gguf_path} holds a {architecture!r} model; only 'llama' can be converted.")
    tensors = _convert_tensors(reader, fields)
    config = _make_config(fields, tied="lm_head.weight" not in tensors)
    tokenizer, tokenizer_config = _make_tokenizer(fields, gguf_path)

    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **special})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


def _make_config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    hidden_size = fields["llama.embedding_length"]
    n_heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": n_heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        # GGUF stores it as float32; the decimal with the fewest digits that gives that float32 is what was meant.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def _convert_tensors(reader: gguf.GGUFReader, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    import gguf
    import numpy as np
    import torch

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors: dict[str, torch.Tensor] = {}
    for stored in reader.tensors:
        values: np.ndarray = gguf.dequantize(stored.data, stored.tensor_type)
        name = _TENSOR_NAMES.get(stored.name)
        if name is None:
            parts = stored.name.split(".")
            if len(parts) != 4 or parts[0] != "blk" or parts[3] != "weight" or parts[2] not in _LAYER_TENSOR_NAMES:
                raise ModelError(f"{stored.name!r} is a tensor that a plain Llama model does not have.")
            if parts[2] in heads:
                values = _unpermute(values, heads[parts[2]])
            name = f"model.layers.{parts[1]}.{_LAYER_TENSOR_NAMES[parts[2]]}.weight"
        tensors[name] = torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
    expected = {"model.embed_tokens.weight", "model.norm.weight"} | {
        f"model.layers.{layer}.{name}.weight"
        for layer in range(fields["llama.block_count"])
        for name in _LAYER_TENSOR_NAMES.values()
    }
    if missing := expected - tensors.keys():
        raise ModelError(f"The GGUF file lacks {len(missing)} tensors, {min(missing)} among them.")
    return tensors


def _unpermute(values: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of a q or k matrix from GGUF's order (rotary pairs adjacent) back to Hugging Face's (two halves)."""
    pairs = values.reshape(n_heads, values.shape[0] // n_heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _make_tokenizer(fields: dict[str, Any], gguf_path: Path) -> tuple[Any, dict[str, Any]]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"{gguf_path} has a tokenizer of kind {kind}; only ('gpt2', 'smollm') can be converted.")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What the name "smollm" stands for: every digit is a token of its own, then GPT-2's byte-level split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    named = {
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }
    return tokenizer, {
        # The class that takes tokenizer.json as it is; a family's own class may rebuild it with another split.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": fields["tokenizer.chat_template"],
        "additional_special_tokens": [token for token in control if token not in named.values()],
        **named,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
