"""Tiny configurations of every model family that the locations are proven on."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

VOCAB_SIZE = 160
N_LAYERS = 3

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 32}

# Family -> (architecture, arguments on top of the common ones).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 2, "hidden_size": 128}),
    "qwen3": ("Qwen3ForCausalLM", _GROUPED),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]},
    ),
    "mistral": ("MistralForCausalLM", {**_GROUPED, "sliding_window": None}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**_GROUPED, "sliding_window": 8, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    "gemma3_text": ("Gemma3ForCausalLM", {**_GROUPED, "sliding_window": 8, "query_pre_attn_scalar": 32}),
    "phi3": ("Phi3ForCausalLM", {"num_key_value_heads": 2, "hidden_size": 128}),
    "olmo2": ("Olmo2ForCausalLM", {"num_key_value_heads": 2, "hidden_size": 128}),
    "gpt2": ("GPT2LMHeadModel", {"hidden_size": 128, "n_inner": 96, "tie_word_embeddings": True}),
    "opt": (
        "OPTForCausalLM",
        {"hidden_size": 128, "ffn_dim": 96, "word_embed_proj_dim": 128, "tie_word_embeddings": True},
    ),
    "falcon": (
        "FalconForCausalLM",
        {
            "hidden_size": 128,
            "ffn_hidden_size": 512,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "alibi": False,
            "tie_word_embeddings": True,
        },
    ),
    "cohere": (
        "CohereForCausalLM",
        {"num_key_value_heads": 2, "hidden_size": 128, "use_qk_norm": True, "tie_word_embeddings": True},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {"hidden_size": 128}),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            # Latent and rotary width together make one of the sizes that the latent kernels take.
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "head_dim": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
        },
    ),
    "glm4": ("Glm4ForCausalLM", {**_GROUPED, "partial_rotary_factor": 0.5}),
    "falcon_serial": (
        "FalconForCausalLM",
        {
            "hidden_size": 128,
            "ffn_hidden_size": 512,
            "new_decoder_architecture": False,
            "parallel_attn": False,
            "multi_query": False,
            "alibi": False,
            "bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_neox_serial": ("GPTNeoXForCausalLM", {"hidden_size": 128, "use_parallel_residual": False}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
}


# Engine arguments that a family needs on CPU; docs/locations.md says why.
ENGINE_ARGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}},
}


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """A configuration of a few layers; the proportions are odd on purpose, so that mix-ups change a shape."""
    architecture, arguments = FAMILIES[family]
    model_type = family.removesuffix("_serial")
    return AutoConfig.for_model(
        model_type, **{**_COMMON, **arguments, **changes}, architectures=[architecture], dtype="float32"
    )
