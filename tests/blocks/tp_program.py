"""`python -m tests.blocks.tp_program MODEL RANKS OUT`: what blocks see on so many ranks, pickled."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch

PROMPTS = [[0, 40, 41, 42, 43], [0, 50, 51]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def read_all(model: Any) -> dict[str, Any]:
    layer = model.model.layers[1]
    attention = layer.self_attn
    found = {"embeddings": model.model.embed_tokens.output, "before": layer.input_layernorm.output[1]}
    found["qkv input"] = attention.qkv_proj.input
    found["qkv"] = attention.qkv_proj.output[0]
    found["q_norm"] = attention.q_norm.output
    found["k_norm"] = attention.k_norm.input
    found["q"], found["k"], found["v"] = attention.attn.inputs[0]
    found["heads"] = attention.attn.output
    found["o_proj input"] = attention.o_proj.input
    found["o_proj"] = attention.o_proj.output[0]
    found["attention"] = attention.output
    found["gate_up"] = layer.mlp.gate_up_proj.output[0]
    found["act_fn input"] = layer.mlp.act_fn.input
    found["neurons"] = layer.mlp.act_fn.output
    found["down_proj input"] = layer.mlp.down_proj.input
    found["mlp"] = layer.mlp.output
    found["hidden"], found["residual"] = layer.output
    found["norm"] = model.model.norm.output[0]
    found["logits"] = model.logits
    found["samples"] = model.samples
    return found


def read_experts(model: Any) -> dict[str, Any]:
    layer = model.model.layers[1]
    found = {"mlp input": layer.mlp.input}
    found["router"] = layer.mlp.gate.output[0].clone()
    layer.mlp.gate.output[0][:, 2] = float("-inf")
    found["experts"] = layer.mlp.experts.output.clone()
    layer.mlp.experts.output[-1] = 0
    found["mlp"] = layer.mlp.output
    found["stream"] = sum(model.model.layers[2].output)
    return found


def tokens(model: Any, tracer: Any) -> list[int]:
    return [model.samples.item() for _ in tracer.all()]


def edited_tokens(model: Any, tracer: Any) -> list[int]:
    found = []
    for step in tracer.all():
        if step % 2:
            model.model.layers[1].self_attn.o_proj.input[:, 32:64] = 0
            model.model.layers[2].mlp.act_fn.output[:] *= 3
        found.append(model.samples.item())
    return found


def edit(name: str) -> Any:
    def block(model: Any) -> Any:
        layer = model.model.layers[1]
        attention = layer.self_attn
        if name == "o_proj input":
            attention.o_proj.input[:] = 0
        elif name == "one head":
            attention.o_proj.input[:, 96:128] = 1
        elif name == "qkv slice":
            attention.qkv_proj.output[0][:, 160:224] *= -1
        elif name == "neurons":
            layer.mlp.act_fn.output[-1, 200:] = 2
        elif name == "gate_up replaced":
            value, bias = layer.mlp.gate_up_proj.output
            layer.mlp.gate_up_proj.output = (value.flip(-1), bias)
        elif name == "mlp":
            layer.mlp.output[:] += 1
        return sum(model.model.layers[3].output)

    return block


def kept_list(model: Any, tracer: Any) -> list[int]:
    return [step for step in tracer.all() if len(model.model.layers[0].output[0])]


def fails(model: Any) -> None:
    model.model.layers[1].mlp.output  # noqa: B018
    _ = 1 / 0


def source(model: Any) -> None:
    model.model.layers[1].mlp.source.self_act_fn_0.output  # noqa: B018


def runs_away(model: Any) -> None:
    while True:
        pass


def main() -> None:
    from harvest import VLLM, BlockError

    path, ranks, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    found: dict[str, Any] = {}
    if "--experts" in sys.argv:
        with VLLM(path, dtype="float32", max_model_len=256, max_num_seqs=4, tensor_parallel_size=ranks) as model:
            found["values"] = [result.value for result in model.run(read_experts, PROMPTS, max_tokens=2, **GREEDY)]
            found["left"] = model.engine.count_blocks()
        out.write_bytes(pickle.dumps(found))
        return
    with VLLM(
        path,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        tensor_parallel_size=ranks,
        block_time_limit_s=5,
    ) as model:
        found["values"] = [result.value for result in model.run(read_all, PROMPTS, max_tokens=1, **GREEDY)]
        found["tokens"] = [result.value for result in model.run(tokens, PROMPTS, max_tokens=4, **GREEDY)]
        found["edited tokens"] = [result.value for result in model.run(edited_tokens, PROMPTS, max_tokens=4, **GREEDY)]
        names = ["none", "o_proj input", "one head", "qkv slice", "neurons", "gate_up replaced", "mlp"]
        found["edits"] = {name: model.run(edit(name), PROMPTS[0], max_tokens=1, **GREEDY).value for name in names}
        found["lists"] = [result.value for result in model.run(kept_list, PROMPTS, max_tokens=3, **GREEDY)]
        try:
            model.run(fails, PROMPTS[0], max_tokens=2)
        except BlockError as error:
            found["error"] = {
                "cause": type(error.__cause__).__name__,
                "line": error.line,
                "location": error.location,
                "text": error.text,
            }
        result = model.run(source, PROMPTS[0], max_tokens=1, errors="return")
        found["source"] = None if result.error is None else str(result.error)
        found["left"] = model.engine.count_blocks()
        try:
            model.run(runs_away, PROMPTS[0], max_tokens=1)
        except Exception as error:
            found["runaway"] = type(error).__name__
        found["after runaway"] = model.run(tokens, PROMPTS[0], max_tokens=2, **GREEDY).value
    out.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
