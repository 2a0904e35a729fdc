"""The page's locations on Llama, Mistral, Gemma and a mixture of experts, against Hugging Face's own forward."""

# mypy: disable-error-code="attr-defined, assignment, var-annotated, unreachable, unused-ignore"

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harvest import BlockError, attention_pattern

PROMPT = [0, *range(40, 63)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 1}
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def make_reference(family: str) -> Any:
    """A random Hugging Face model of the family."""
    import transformers

    from tests.tiny_models import scale_weights

    torch.manual_seed(0)
    if family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    elif family == "mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE, sliding_window=8))
    elif family == "gemma":
        model = transformers.GemmaForCausalLM(transformers.GemmaConfig(**{**SHAPE, "tie_word_embeddings": True}))
    else:
        model = transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
            )
        )
    scale_weights(model)
    return model.eval()


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma", "qwen3-moe"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any, Any]]:
    """(name, model on vLLM, the same model on Hugging Face)."""
    from harvest import VLLM
    from tests.tiny_models import train_tokenizer

    folder: Path = tmp_path_factory.mktemp("family") / request.param
    train_tokenizer(folder)
    reference = make_reference(request.param)
    reference.save_pretrained(folder)
    with VLLM(folder, dispatch=True, dtype="float32", max_model_len=256, max_num_seqs=4) as model:
        yield request.param, model, reference
        assert model.engine.count_blocks() == [0]


def test_the_page_s_locations_exist_and_the_stream_is_hugging_faces(family: Any) -> None:
    name, model, reference = family
    with model.trace(PROMPT, **GREEDY):
        embeddings = model.model.embed_tokens.output.save()
        before, after = [].save(), [].save()
        for layer in model.model.layers:
            before.append(layer.input_layernorm.output[1] if layer is not model.model.layers[0] else None)
            qkv = layer.self_attn.qkv_proj.output[0].save()
            kernel_inputs = [part.shape[1] for part in layer.self_attn.attn.inputs[0]].save()
            heads = layer.self_attn.o_proj.input.save()
            attention = layer.self_attn.output.save()
            if name != "qwen3-moe":
                neurons = layer.mlp.act_fn.output.save()
            mlp = layer.mlp.output.save()
            after.append(layer.output[0] + layer.output[1])
        norm = model.model.norm.output[0].save()
        logits = model.logits.save()

    n = len(PROMPT)
    assert embeddings.shape == attention.shape == mlp.shape == norm.shape == (n, 128)
    assert (qkv.shape, heads.shape) == ((n, 256), (n, 128))
    assert kernel_inputs == [128, 64, 64]
    if name != "qwen3-moe":
        assert neurons.shape == (n, 256)
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT]), output_hidden_states=True)
    streams = expected.hidden_states
    for index in range(2):
        assert torch.allclose(after[index], streams[index + 1][0], atol=2e-3), index
        assert torch.allclose(before[index + 1], streams[index + 1][0], atol=2e-3), index
    assert torch.allclose(norm, streams[-1][0], atol=5e-3)
    assert torch.allclose(logits[0], expected.logits[0, -1], atol=2e-2)


def test_the_attention_pattern_rebuilt_from_queries_and_keys(family: Any) -> None:
    _, model, _ = family
    layer = model.model.layers[1]
    with model.trace(PROMPT, **GREEDY):
        q, k, v = layer.self_attn.attn.inputs[0]
        pattern = attention_pattern(q, k, layer.self_attn.attn).save()
        values = v.reshape(len(v), -1, 32).repeat_interleave(2, dim=1)
        rebuilt = torch.einsum("hqk,khd->qhd", pattern, values).flatten(1).save()
        kernel = layer.self_attn.attn.output.save()

    assert pattern.shape == (4, len(PROMPT), len(PROMPT))
    assert torch.allclose(pattern.sum(-1), torch.ones(4, len(PROMPT)))
    assert torch.allclose(rebuilt, kernel.reshape(rebuilt.shape), atol=1e-4)


def test_the_pattern_of_a_decode_step_needs_the_keys_kept(family: Any) -> None:
    _, model, _ = family
    layer = model.model.layers[1]
    with model.trace(PROMPT, **{**GREEDY, "max_tokens": 3}) as tracer:
        keys, values = [], []
        errors = [].save()
        for step in tracer.iter[:3]:
            q, k, v = layer.self_attn.attn.inputs[0]
            keys.append(k)
            values.append(v)
            pattern = attention_pattern(q, torch.cat(keys), layer.self_attn.attn)
            all_values = torch.cat(values).reshape(-1, 2, 32).repeat_interleave(2, dim=1)
            rebuilt = torch.einsum("hqk,khd->qhd", pattern, all_values).flatten(1)
            errors.append((rebuilt - layer.self_attn.attn.output.reshape(rebuilt.shape)).abs().max().item())
            if step:
                assert pattern.shape[1] == 1
    assert max(errors) < 1e-4


def test_a_masked_router_logit_removes_an_expert(family: Any) -> None:
    name, model, _ = family
    if name != "qwen3-moe":
        pytest.skip("no experts")
    layer = model.model.layers[1]
    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        with tracer.invoke(PROMPT):
            router = layer.mlp.gate.output[0].clone().save()
            layer.mlp.gate.output[0][:, 2] = float("-inf")
            masked = layer.mlp.output.save()
        with tracer.invoke(PROMPT):
            plain = layer.mlp.output.save()

    assert router.shape == (len(PROMPT), 4)
    chosen = router.topk(2).indices
    uses_expert = (chosen == 2).any(-1)
    assert uses_expert.any()
    assert not uses_expert.all()
    differs = (masked - plain).abs().amax(-1) > 1e-4
    assert torch.equal(differs, uses_expert)


def test_one_expert_and_the_inside_of_a_fused_kernel_are_no_locations(family: Any) -> None:
    name, model, _ = family
    if name != "qwen3-moe":
        pytest.skip("no experts")
    with pytest.raises(BlockError) as caught, model.trace(PROMPT, **GREEDY):
        model.model.layers[1].mlp.experts[0].output.save()
    assert caught.value.__cause__ is not None


def test_experts_output_is_writable_and_per_request(family: Any) -> None:
    name, model, _ = family
    if name != "qwen3-moe":
        pytest.skip("no experts")
    layer = model.model.layers[1]
    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        with tracer.invoke(PROMPT):
            rows = len(layer.mlp.experts.output).save()
            layer.mlp.experts.output[:] = 0
            mlp = layer.mlp.output.save()
        with tracer.invoke(PROMPT[:5]):
            rows = len(layer.mlp.experts.output).save()
            mlp = layer.mlp.output.save()
    assert rows == [len(PROMPT), 5]
    assert mlp[0].abs().max() == 0
    assert mlp[1].abs().max() > 0
