"""What the aliases mean in each model family, as vLLM paths.

An alias means the same everywhere:

- `embed`: the token's row of the embedding table, before scaling and positions
- `residual_pre`, `residual_mid`, `residual` (`residual_post`): the residual stream before layer N, between its
  attention and its MLP, and after it
- `attn_in`, `attn_out`, `mlp_in`, `mlp_out`: what the attention and the MLP module receive and return, so a norm that
  a family applies to the returned value before adding it to the stream is not part of it
- `neurons`: the MLP's activations, as its last projection receives them
- `q`, `k`, `v`: as the attention kernel gets them (after norms and rotation); `heads`: each head's output side by
  side, as the output projection receives it
- `router`: the router's logits
- `final_norm`: the stream after the last norm; `logits`: of sampled rows, as the sampler gets them

Where a family has several spellings (versions, options), they are tried in order. What a family does not have is
refused with the reason given here. Streams are found from the data flow instead (see `stream.py`), except where a
family is named in `STREAM_IS_FIRST`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

PER_LAYER = (
    "residual_pre",
    "residual_mid",
    "residual",
    "attn_in",
    "attn_out",
    "mlp_in",
    "mlp_out",
    "neurons",
    "q",
    "k",
    "v",
    "heads",
    "router",
)
ONCE = ("embed", "final_norm", "logits")
SYNONYMS = {"residual_post": "residual"}
STREAMS = ("residual_pre", "residual")
ALIASES = ("embed", *PER_LAYER, "final_norm", "logits")

_NO_ROUTER = "its MLPs are dense"
_FUSED_EXPERTS = "its experts run inside one fused kernel"
_PARALLEL = "attention and MLP both read the stream before the layer, so nothing lies between them"
_NO_FINAL_NORM = "it has no norm after its last layer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The aliases of one family. Paths of `layer` are relative to a decoder layer."""

    name: str
    layers: str
    once: dict[str, tuple[str, ...]]
    layer: dict[str, tuple[str, ...]]
    missing: dict[str, str] = field(default_factory=dict)
    """Why an alias has no place in this family."""


def _attention(module: str, projection: str, **sides: str) -> dict[str, tuple[str, ...]]:
    return {
        "attn_in": (sides["attn_in"],),
        "attn_out": (sides["attn_out"],),
        "q": (f"{module}.attn.inputs[0][0]",),
        "k": (f"{module}.attn.inputs[0][1]",),
        "v": (f"{module}.attn.inputs[0][2]",),
        "heads": (f"{module}.{projection}.input",),
    }


_SELF_ATTENTION = _attention(
    "self_attn", "o_proj", attn_in="self_attn.inputs[1][hidden_states]", attn_out="self_attn.output"
)
_MLP = {"mlp_in": ("mlp.input",), "mlp_out": ("mlp.output",), "neurons": ("mlp.down_proj.input",)}
_LOGITS = {"logits": ("logits_processor.output",)}

LLAMA = Family(
    name="Llama",
    layers="model.layers",
    once={"embed": ("model.embed_tokens.output",), "final_norm": ("model.norm.output[0]",), **_LOGITS},
    layer={**_SELF_ATTENTION, **_MLP, "residual_mid": ("post_attention_layernorm.output[1]",)},
    missing={"router": _NO_ROUTER},
)
_MOE_MISSING = {"neurons": _FUSED_EXPERTS, "router": "this layer's MLP is dense"}
QWEN3_MOE = replace(
    LLAMA, name="Qwen3-MoE", layer={**LLAMA.layer, "router": ("mlp.gate.output[0]",)}, missing=_MOE_MISSING
)
GEMMA = replace(
    LLAMA, name="Gemma 2/3", layer={**LLAMA.layer, "residual_mid": ("pre_feedforward_layernorm.output[1]",)}
)
GLM4 = replace(LLAMA, name="GLM4")
COHERE = replace(
    LLAMA,
    name="Cohere",
    layer={alias: paths for alias, paths in LLAMA.layer.items() if alias != "residual_mid"},
    missing={"router": _NO_ROUTER, "residual_mid": _PARALLEL},
)
DEEPSEEK = replace(
    LLAMA,
    name="DeepSeek-V2/V3",
    layer={
        **LLAMA.layer,
        "attn_in": ("self_attn.inputs[0][1]",),
        "router": ("mlp.gate.output[0]",),
    },
    missing={
        **_MOE_MISSING,
        "q": "multi-head latent attention never forms per-head keys and values",
        "k": "multi-head latent attention never forms per-head keys and values",
        "v": "multi-head latent attention never forms per-head keys and values",
    },
)
GPT_OSS = Family(
    name="GPT-OSS",
    layers="model.layers",
    once={"embed": ("model.embedding.output",), "final_norm": ("model.norm.output[0]",), **_LOGITS},
    layer={
        **_attention("attn", "o_proj", attn_in="attn.inputs[0][0]", attn_out="attn.output"),
        "mlp_in": ("mlp.input",),
        "mlp_out": ("mlp.output",),
        "router": ("mlp.router.output", "mlp.router.output[0]"),
        "residual_mid": ("post_attention_layernorm.output[1]",),
    },
    missing={"neurons": _FUSED_EXPERTS},
)
GPT2 = Family(
    name="GPT-2",
    layers="transformer.h",
    once={"embed": ("transformer.wte.output",), "final_norm": ("transformer.ln_f.output",), **_LOGITS},
    layer={
        **_attention("attn", "c_proj", attn_in="attn.inputs[1][hidden_states]", attn_out="attn.output"),
        "mlp_in": ("mlp.input",),
        "mlp_out": ("mlp.output",),
        "neurons": ("mlp.c_proj.input",),
        "residual_mid": ("ln_2.input",),
    },
    missing={"router": _NO_ROUTER},
)
OPT = Family(
    name="OPT",
    layers="model.decoder.layers",
    once={
        "embed": ("model.decoder.embed_tokens.output",),
        "final_norm": ("model.decoder.final_layer_norm.output",),
        **_LOGITS,
    },
    layer={
        **_attention(
            "self_attn", "out_proj", attn_in="self_attn.inputs[1][hidden_states]", attn_out="self_attn.output"
        ),
        "mlp_in": ("fc1.input",),
        "mlp_out": ("fc2.output[0]",),
        "neurons": ("fc2.input",),
        "residual_mid": ("final_layer_norm.input",),
    },
    missing={"router": _NO_ROUTER, "final_norm": _NO_FINAL_NORM},
)
# Post-norm: the stream between attention and MLP is what the MLP reads.
OPT_POST_NORM = replace(OPT, name="OPT (post-norm)", layer={**OPT.layer, "residual_mid": ("fc1.input",)})
FALCON = Family(
    name="Falcon",
    layers="transformer.h",
    once={"embed": ("transformer.word_embeddings.output",), "final_norm": ("transformer.ln_f.output",), **_LOGITS},
    layer={
        **_attention(
            "self_attention",
            "dense",
            attn_in="self_attention.inputs[1][hidden_states]",
            attn_out="self_attention.output[0]",
        ),
        "mlp_in": ("mlp.input",),
        "mlp_out": ("mlp.output[0]",),
        "neurons": ("mlp.dense_4h_to_h.input",),
        "residual_mid": ("post_attention_layernorm.input",),
    },
    missing={"router": _NO_ROUTER, "residual_mid": _PARALLEL},
)
# Served by the Transformers backend: Hugging Face's own modules, attention instances and projections from vLLM.
TRANSFORMERS = Family(
    name="Transformers backend",
    layers="model.layers",
    once={
        "embed": ("model.embed_tokens.output",),
        "final_norm": ("model.norm.output", "model.norm.output[0]"),
        **_LOGITS,
    },
    layer={
        **_attention(
            "self_attn", "o_proj", attn_in="self_attn.inputs[1][hidden_states]", attn_out="self_attn.output[0]"
        ),
        **_MLP,
        "residual_mid": ("post_attention_layernorm.input",),
    },
    missing={"router": _NO_ROUTER},
)
# OLMo2 norms what attention and MLP return, so the MLP reads the stream itself.
OLMO2 = replace(TRANSFORMERS, name="OLMo2", layer={**TRANSFORMERS.layer, "residual_mid": ("mlp.input",)})
_NEOX_LAYER = {
    **_attention("attention", "dense", attn_in="attention.input", attn_out="attention.output[0]"),
    "mlp_in": ("mlp.input",),
    "mlp_out": ("mlp.output",),
    "neurons": ("mlp.dense_4h_to_h.input",),
}
GPT_NEOX = Family(
    name="GPT-NeoX",
    layers="model.layers",
    once={"embed": ("model.embed_in.output",), "final_norm": ("model.final_layer_norm.output",), **_LOGITS},
    layer=_NEOX_LAYER,
    missing={"router": _NO_ROUTER, "residual_mid": _PARALLEL},
)
GPT_NEOX_SERIAL = replace(
    GPT_NEOX,
    name="GPT-NeoX (serial)",
    layer={**_NEOX_LAYER, "residual_mid": ("post_attention_layernorm.input",)},
    missing={"router": _NO_ROUTER},
)

_BY_ARCHITECTURE = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": replace(LLAMA, name="Mistral"),
    "Phi3ForCausalLM": replace(LLAMA, name="Phi-3"),
    "Qwen2ForCausalLM": replace(LLAMA, name="Qwen2"),
    "Qwen3ForCausalLM": replace(LLAMA, name="Qwen3"),
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Gemma2ForCausalLM": replace(GEMMA, name="Gemma 2"),
    "Gemma3ForCausalLM": replace(GEMMA, name="Gemma 3"),
    "Glm4ForCausalLM": GLM4,
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": COHERE,
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "GptOssForCausalLM": GPT_OSS,
    "GPT2LMHeadModel": GPT2,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": replace(OLMO2, name="OLMo3"),
}

# Layers that return (stream, something else), although the next norm is handed both.
STREAM_IS_FIRST = frozenset({"CohereForCausalLM", "Cohere2ForCausalLM"})


def family_of(architecture: str, config: Any, *, transformers_backend: bool) -> Family | None:
    """The family of a model, None for one that is not listed.

    Args:
        architecture: of the configuration, such as `Qwen3ForCausalLM`.
        config: the text model's Hugging Face configuration.
        transformers_backend: vLLM serves the model through Hugging Face's modules.
    """
    if architecture == "GPTNeoXForCausalLM":
        return GPT_NEOX if getattr(config, "use_parallel_residual", True) else GPT_NEOX_SERIAL
    if architecture == "OPTForCausalLM":
        return OPT if getattr(config, "do_layer_norm_before", True) else OPT_POST_NORM
    if architecture == "FalconForCausalLM":
        parallel = getattr(config, "new_decoder_architecture", False) or getattr(config, "parallel_attn", True)
        return FALCON if parallel else replace(FALCON, name="Falcon (serial)")
    if architecture in _BY_ARCHITECTURE:
        return _BY_ARCHITECTURE[architecture]
    return TRANSFORMERS if transformers_backend else None
