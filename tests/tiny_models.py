"""Tiny models with random weights of real scale, made by the test suite; nothing is downloaded.

What makes them fit for tests of rows: every layer changes the residual stream by tens of per cent of its norm (so that
a row of the wrong layer, position or request is far from the right one), attention looks at several tokens (so that a
wrong context shows), and logits are peaked (so that greedy decoding does not hang on rounding).

Other families use `train_tokenizer` and `scale_weights` on a model of their own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from harvest.demo_text import make_demo_prompts

Family = Literal["qwen3", "llama"]

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
_ROLE_START, _ROLE_END = "<|role|>", "<|turn|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|role|>' + message['role'] + '\n' + message['content'] "
    "+ '<|turn|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|role|>assistant\n' }}{% endif %}"
)


def make_tiny_model(
    family: Family,
    path: Path,
    *,
    layers: int = 4,
    hidden: int = 128,
    intermediate: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 1024,
    max_length: int = 2048,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Write a model folder of `family` with its tokenizer to `path` and return it. vLLM on CPU needs head_dim >= 32."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    train_tokenizer(path, vocab=vocab, max_length=max_length)
    shape: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    torch.manual_seed(seed)
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    scale_weights(model, seed=seed)
    model.to(dtype).save_pretrained(path)
    return path


def scale_weights(model: torch.nn.Module, *, seed: int = 0) -> None:
    """Give every parameter a random value of real scale, by its shape and name; deterministic for a seed.

    - matrices: fan-in scaled, so that a layer's output has the norm of its input; query and key larger, so that
      attention is not uniform; embeddings of norm sqrt(width); the output head sharp enough for stable greedy decoding;
    - norm weights: 1 with a spread of 0.2 (an untouched 1 would hide a forgotten norm); other vectors: small biases.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter.dim() < 2:
                value = 1 + 0.2 * noise if "norm" in name or "ln_" in name else 0.1 * noise
            elif "embed" in name or "wte" in name or "wpe" in name:
                value = noise
            elif "lm_head" in name or "embed_out" in name:
                value = noise * 3 * parameter.shape[-1] ** -0.5
            elif any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn")):
                value = noise * 1.5 * parameter.shape[-1] ** -0.5
            else:
                value = noise * parameter.shape[-1] ** -0.5
            parameter.copy_(value.to(parameter.dtype))


def train_tokenizer(path: Path, *, vocab: int = 1024, max_length: int = 2048) -> Path:
    """Train a byte-level BPE tokenizer of exactly `vocab` entries on the demo text and write its files into `path`.

    Ids 0, 1, 2 are BOS, EOS, PAD. BOS is added in front by default, as Llama's does; there is a chat template.
    """
    specials = [BOS, EOS, PAD, _ROLE_START, _ROLE_END]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([prompt.text for prompt in make_demo_prompts()], trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"The demo text gives {tokenizer.get_vocab_size()} tokens, not the {vocab} asked for.")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [_ROLE_START, _ROLE_END],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return path
