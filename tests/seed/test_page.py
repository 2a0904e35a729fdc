"""Every example of "Writing a block", as the page has it; only the model and the numbers that follow from it differ.

Run on a random Qwen3 (24 layers, so that the page's layers exist) and on SmolLM2, where the text makes sense.
"""

# The page writes list().save() and dict().save(); type checkers know no .save().
# ruff: noqa: C408
# mypy: disable-error-code="attr-defined, assignment, var-annotated, unreachable, unused-ignore"

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harvest import VLLM, LoopCutWarning


@pytest.fixture(scope="module", params=["qwen3", "smollm2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLM]:
    path: Path
    if request.param == "qwen3":
        from tests.tiny_models import make_tiny_model

        path = make_tiny_model("qwen3", tmp_path_factory.mktemp("seed") / "model", layers=24)
    else:
        path = request.getfixturevalue("smollm2")
    with VLLM(path, dispatch=True, dtype="float32", max_model_len=256, max_num_seqs=8) as opened:
        yield opened


@pytest.fixture
def is_text(model: VLLM) -> bool:
    """Whether the model's text makes sense."""
    return bool(model.config.model_type == "llama")


@pytest.fixture
def width(model: VLLM) -> int:
    return int(model.config.hidden_size)


def n_tokens(model: VLLM, text: str) -> int:
    return len(model.tokenizer(text).input_ids)


def test_shapes(model: VLLM, width: int) -> None:
    with model.trace("The capital of France is", temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        shapes = list().save()
        for _ in tracer.iter[:3]:
            shapes.append((tuple(model.model.layers[10].output[0].shape), tuple(model.logits.shape)))

    t, vocab = n_tokens(model, "The capital of France is"), model.config.vocab_size
    assert shapes == [((t, width), (1, vocab)), ((1, width), (1, vocab)), ((1, width), (1, vocab))]


def test_the_residual_stream(model: VLLM, width: int) -> None:
    with model.trace("The capital of France is", temperature=0.0):
        hidden, residual = model.model.layers[10].output
        norms = (hidden.norm(dim=-1)[-1].item(), residual.norm(dim=-1)[-1].item()).save()
        stream = (hidden + residual).save()  # the residual stream after layer 10  # fmt: skip
        before_next = model.model.layers[11].input_layernorm.output[1].save()

    assert [type(n) for n in norms] == [float, float]
    assert min(norms) > 0
    assert stream.shape == (n_tokens(model, "The capital of France is"), width)
    assert (stream - before_next).abs().max() < 1e-3 * stream.abs().max()


def test_linear_layers_return_a_pair_and_a_layers_input_is_positions(model: VLLM, width: int) -> None:
    with model.trace("The capital of France is", temperature=0.0, max_tokens=1):
        positions = model.model.layers[10].input.save()
        args, kwargs = model.model.layers[10].inputs
        hidden = [value for value in (*args, *kwargs.values()) if value is not None and value.dim() == 2].save()
        value, bias = model.model.layers[10].self_attn.o_proj.output
        shape = tuple(value.shape).save()
        no_bias = [bias].save()

    t = n_tokens(model, "The capital of France is")
    assert positions.tolist() == list(range(t))
    assert [tuple(part.shape) for part in hidden] == [(t, width), (t, width)]
    assert shape == (t, width)
    assert no_bias == [None]


def test_clone_what_you_keep(model: VLLM) -> None:
    layer = model.model.layers[10]

    with model.trace("The capital of France is", temperature=0.0):
        view = layer.output[1].save()  # a view of vLLM's buffer  # fmt: skip
        copy = layer.output[1].clone().save()  # a copy, taken before layer 11 runs  # fmt: skip

    # The page warns that these differ; here what a block keeps is always its own.
    assert (view - copy).abs().max().item() == 0


def test_clone_reads_by_environment(model: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HARVEST_CLONE_READS", "NNSIGHT_VLLM_CLONE_READS"):
        for value, expected in (("1", True), ("true", True), ("0", False), ("no", False), ("", False)):
            monkeypatch.setenv(name, value)
            assert VLLM("no-such-model").clone_reads is expected
        monkeypatch.delenv(name)
    assert VLLM("no-such-model").clone_reads is False
    assert VLLM("no-such-model", clone_reads=True).clone_reads is True


def test_writing(model: VLLM) -> None:
    def last_logits(**edit: Any) -> Any:
        layer = model.model.layers[10]
        with model.trace("The capital of France is", temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
            logits = list().save()
            seen = list().save()
            for step in tracer.iter[:2]:
                if edit.get("every_step") or (edit and step == 0):
                    out = layer.mlp.output
                    if "add" in edit:
                        out[:] += edit["add"]
                    if "last" in edit:
                        out[-1] = edit["last"]
                    if "replace" in edit:
                        layer.mlp.output = out * edit["replace"]
                    seen.append(model.model.layers[11].input_layernorm.input.clone())
                logits.append(model.logits.clone())
        return logits, seen

    plain, _ = last_logits()
    added, seen = last_logits(add=3.0)
    assert not plain[0].equal(added[0])
    kept_on, _ = last_logits(add=3.0, every_step=True)
    assert kept_on[0].equal(added[0])
    assert not kept_on[1].equal(added[1])
    _, seen = last_logits(last=0.0)
    assert seen[0][-1].abs().max() == 0
    assert seen[0][0].abs().max() > 0
    _, seen = last_logits(replace=0.0)
    assert seen[0].abs().max() == 0


def test_generation_steps(model: VLLM, is_text: bool) -> None:
    berlin = model.tokenizer.encode(" Berlin")[-1]

    with model.trace("The capital of France is", temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
        tokens = list().save()
        for step in tracer.iter[:6]:
            if step == 0:
                model.samples[:] = berlin  # force the first token  # fmt: skip
            tokens.append(model.samples.item())
        out = tracer.result.save()

    assert tokens[0] == berlin
    assert tokens == list(out.outputs[0].token_ids)
    assert model.tokenizer.decode(tokens, skip_special_tokens=True) == out.outputs[0].text
    if is_text:
        assert out.outputs[0].text.startswith(" Berlin")


def test_all_runs_on_every_step(model: VLLM) -> None:
    with model.trace("The capital of France is", temperature=0.0, max_tokens=5, ignore_eos=True) as tracer:
        rows = list().save()
        for _ in tracer.all():
            rows.append(len(model.model.layers[10].output[0]))
        out = tracer.result.save()

    assert rows == [n_tokens(model, "The capital of France is"), 1, 1, 1, 1]
    assert len(out.outputs[0].token_ids) == 5


def test_a_loop_that_asks_for_more_steps_is_cut_short_and_says_so(model: VLLM) -> None:
    after = "untouched"
    with (
        pytest.warns(LoopCutWarning, match="after 3 steps, before step 3"),
        model.trace("The capital of France is", temperature=0.0, max_tokens=3, ignore_eos=True) as tracer,
    ):
        tokens = list().save()
        for _ in tracer.iter[:9]:
            tokens.append(model.samples.item())
        after = "changed".save()

    assert len(tokens) == 3
    assert after == "untouched"
    assert tracer.results[0].steps == 3
    assert tracer.results[0].cut


def test_sampling_arguments_reach_vllm(model: VLLM) -> None:
    with model.trace(
        "The capital of France is", temperature=0.7, top_p=0.9, max_tokens=4, seed=3, logprobs=2, ignore_eos=True
    ) as tracer:
        first = tracer.result.save()
    with model.trace(temperature=0.7, top_p=0.9, max_tokens=9, seed=3, ignore_eos=True) as tracer:
        with tracer.invoke("The capital of France is", max_tokens=4):
            second = tracer.result.save()

    assert len(first.outputs[0].token_ids) == 4
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert len(first.outputs[0].logprobs[0]) >= 2
    stop = first.outputs[0].text[:3]
    with model.trace("The capital of France is", temperature=0.7, top_p=0.9, max_tokens=4, seed=3, stop=stop) as tracer:
        stopped = tracer.result.save()
    assert stopped.outputs[0].finish_reason == "stop"


def test_generate_without_with(model: VLLM, is_text: bool) -> None:
    outputs = model.generate(["The capital of France is", "Paris is in"], temperature=0.0, max_tokens=4)
    (again,) = model.generate("The capital of France is", temperature=0.0, max_tokens=4)
    assert [output.prompt for output in outputs] == ["The capital of France is", "Paris is in"]
    assert outputs[0].outputs[0].text == again.outputs[0].text
    if is_text:
        assert "Paris" in outputs[0].outputs[0].text


def test_several_prompts(model: VLLM, width: int, is_text: bool) -> None:
    prompts = ["Paris is in", "The capital of Japan is", "Berlin is the capital of"]

    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                stream = sum(model.model.layers[20].output).save()
                token = model.logits.argmax(-1).save()

    assert len(stream) == len(token) == 3
    for prompt, s, t in zip(prompts, stream, token, strict=True):
        assert tuple(s.shape) == (n_tokens(model, prompt), width)
        alone = model.generate(prompt, temperature=0.0, max_tokens=1)[0].outputs[0]
        assert alone.token_ids[0] == t.item()
    if is_text:
        assert model.tokenizer.decode(token[1]) == " Tokyo"


def test_invokes_cannot_wait_for_each_other(model: VLLM) -> None:
    with pytest.raises(NotImplementedError, match="save the value in one trace and use it in the next"):
        with model.trace(max_tokens=1) as tracer:
            with tracer.invoke("a"):
                pass
            tracer.barrier(2)


def test_a_value_moves_between_prompts_by_two_traces(model: VLLM) -> None:
    layer = model.model.layers[10]
    with model.trace("Paris is in", temperature=0.0, max_tokens=1):
        source = layer.output[0][-1].save()
        source_residual = layer.output[1][-1].save()
    with model.trace("Berlin is the capital of", temperature=0.0, max_tokens=1):
        hidden, residual = layer.output
        hidden[-1] = source
        residual[-1] = source_residual
        patched = model.model.layers[11].input_layernorm.output[1][-1].save()

    assert (patched - (source + source_residual)).abs().max() < 1e-3 * patched.abs().max()


def test_chat(model: VLLM, is_text: bool) -> None:
    messages = [{"role": "user", "content": "In one word, what is the capital of France?"}]
    ids = model.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True,
                                              enable_thinking=False)  # a Qwen3 option  # fmt: skip

    with model.trace(ids, temperature=0.0, max_tokens=8) as tracer:
        out = tracer.result.save()

    asked = ids["input_ids"] if hasattr(ids, "keys") else ids
    assert list(out.prompt_token_ids) == list(asked)
    if is_text:
        assert "Paris" in out.outputs[0].text


def test_the_table_by_name(model: VLLM, width: int) -> None:
    config = model.config
    with model.trace("The capital of France is", temperature=0.0, max_tokens=1):
        shapes = dict().save()
        L = model.model.layers[10]
        shapes["embeddings"] = model.model.embed_tokens.output.shape
        shapes["before"] = L.input_layernorm.output[1].shape
        shapes["qkv"] = L.self_attn.qkv_proj.output[0].shape
        shapes["q"], shapes["k"], shapes["v"] = (part.shape for part in L.self_attn.attn.inputs[0])
        shapes["heads"] = L.self_attn.o_proj.input.shape
        shapes["attention"] = L.self_attn.output.shape
        shapes["neurons"] = L.mlp.act_fn.output.shape
        shapes["mlp"] = L.mlp.output.shape
        shapes["after"] = (L.output[0] + L.output[1]).shape
        shapes["norm"] = model.model.norm.output[0].shape

    t = n_tokens(model, "The capital of France is")
    head_dim = getattr(config, "head_dim", None) or width // config.num_attention_heads
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    assert {name: tuple(shape) for name, shape in shapes.items()} == {
        "embeddings": (t, width),
        "before": (t, width),
        "qkv": (t, q + 2 * kv),
        "q": (t, q),
        "k": (t, kv),
        "v": (t, kv),
        "heads": (t, q),
        "attention": (t, width),
        "neurons": (t, config.intermediate_size),
        "mlp": (t, width),
        "after": (t, width),
        "norm": (t, width),
    }


def test_the_shared_rotary_module_is_read_through_its_layer(model: VLLM) -> None:
    layer = model.model.layers[3]
    with model.trace("Paris is in", temperature=0.0, max_tokens=1):
        rotated = layer.self_attn.rotary_emb.output[0].clone().save()
        queries = layer.self_attn.attn.inputs[0][0].save()

    # The page knows the second way only; the first is this layer's call of the shared module.
    assert queries.equal(rotated.reshape(queries.shape))


def test_operations_by_source(model: VLLM) -> None:
    with model.trace("Paris is in", temperature=0.0, max_tokens=1):
        fused = model.model.layers[10].self_attn.source.self_qkv_proj_0.output[0].save()
        parts = model.model.layers[10].self_attn.source.qkv_split_0.output.save()
        kernel = model.model.layers[10].self_attn.source.self_attn_0.output.save()
        direct = model.model.layers[10].self_attn.o_proj.input.save()

    assert fused.equal(torch.cat(list(parts), -1))
    assert kernel.equal(direct)
