"""A model of a few lines, driven step by step like vLLM drives its own: what blocks do, without an engine.

Layers add their index + 1 to every row; `reuse=True` makes the model overwrite each layer's output afterwards, as fused
kernels do on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from actors.worker.blocks.returns import pack_outcome, unpack_outcome
from actors.worker.blocks.runtime import BlockRuntime
from actors.worker.blocks.wire import BlockCode, BlockOutcome, pack
from actors.worker.step import StepRows

WIDTH = 6
VOCAB = 11


class ToyLayer(nn.Module):
    def __init__(self, index: int, shared: nn.Module) -> None:
        super().__init__()
        self.index = index
        self.inner = nn.Identity()
        self.shared = shared

    def forward(self, positions: Tensor, hidden: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        changed = self.inner(hidden)
        added = torch.add(changed, (self.index + 1) * scale)
        self.shared(positions)
        return added, torch.mul(added, 2)


class ToyModel(nn.Module):
    def __init__(self, n_layers: int = 3, *, reuse: bool = False) -> None:
        super().__init__()
        shared = nn.Sequential(nn.Identity())
        self.layers = nn.ModuleList([ToyLayer(index, shared) for index in range(n_layers)])
        self.unused = nn.Identity()
        self.reuse = reuse

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        for layer in self.layers:
            pair = layer(positions, hidden=hidden)
            hidden = pair[0].clone()
            if self.reuse:
                for tensor in pair:
                    tensor.fill_(torch.nan)
        return hidden


def rows(values: list[float]) -> Tensor:
    """Rows whose columns are all alike."""
    return torch.tensor(values)[:, None].expand(-1, WIDTH)


@dataclass
class ToyRequest:
    block: Callable[..., Any]
    n_prompt: int = 3
    n_steps: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    seen: list[Tensor] = field(default_factory=list)
    """The model's final rows of this request, step by step."""
    sampled: list[int] = field(default_factory=list)


class ToyEngine:
    """Runs requests in one batch; the row of request r, position p starts as 100 r + p in every column."""

    def __init__(self, model: ToyModel | None = None, **runtime: Any) -> None:
        self.model = model or ToyModel()
        self.runtime = BlockRuntime(self.model, device=torch.device("cpu"), **runtime)

    def run(self, *requests: ToyRequest, order: Sequence[int] | None = None, n_padding: int = 0) -> list[BlockOutcome]:
        for number, request in enumerate(requests):
            code = BlockCode(
                code=None, function=request.block, names={}, filename=request.block.__code__.co_filename, source=""
            )
            self.runtime.add_request(f"r{number}", {"key": f"k{number}", "payload": pack(code).head, **request.options})
        outcomes: dict[int, BlockOutcome] = {}
        step = 0
        while len(outcomes) < len(requests):
            running = [number for number in order or range(len(requests)) if number not in outcomes]
            with torch.inference_mode():
                ended = self._step(requests, running, step, n_padding)
            for number in running:
                if step + 1 >= requests[number].n_steps or f"r{number}" in ended:
                    outcomes[number] = self._finish(number)
            step += 1
        assert self.runtime.n_tasks == 0
        return [outcomes[number] for number in range(len(requests))]

    def _step(self, requests: Sequence[ToyRequest], running: list[int], step: int, n_padding: int) -> set[str]:
        counts = [requests[number].n_prompt if step == 0 else 1 for number in running]
        firsts = [0 if step == 0 else requests[number].n_prompt + step - 1 for number in running]
        starts = np.concatenate([[0], np.cumsum(counts)])
        rows = StepRows(
            request_ids=tuple(f"r{number}" for number in running), starts=starts, first_positions=np.array(firsts)
        )
        positions = torch.cat([torch.arange(first, first + n) for first, n in zip(firsts, counts, strict=True)])
        owners = torch.cat([torch.full((n,), 100.0 * number) for number, n in zip(running, counts, strict=True)])
        hidden = (owners + positions)[:, None].expand(-1, WIDTH).clone()
        hidden = torch.cat([hidden, torch.full((n_padding, WIDTH), torch.nan)])
        positions = torch.cat([positions, torch.full((n_padding,), -1)])
        self.runtime.begin_step(rows, n_padded_rows=len(hidden) if n_padding else None)
        hidden = self.model(hidden, positions)
        self.runtime.end_forward()
        logits = torch.zeros(len(running), VOCAB)
        logits[:, step % VOCAB] = 1
        self.runtime.serve_logits(logits)
        samples = logits.argmax(-1, keepdim=True).to(torch.int32)
        self.runtime.serve_samples(samples)
        self.runtime.end_step()
        for slot, number in enumerate(running):
            requests[number].seen.append(hidden[starts[slot] : starts[slot + 1]].clone())
            requests[number].sampled.append(int(samples[slot]))
        return self.runtime.take_ended()

    def _finish(self, number: int) -> BlockOutcome:
        (outcome,) = self.runtime.finish(f"k{number}", f"output of {number}")
        return unpack_outcome(pack_outcome(outcome, limit_bytes=1 << 20, keep_buffers=True))


def run_one(block: Callable[..., Any], *, model: ToyModel | None = None, **request: Any) -> BlockOutcome:
    """One block, alone; its error raised as it is."""
    (outcome,) = ToyEngine(model).run(ToyRequest(block, **request))
    if outcome.failure is not None:
        raise outcome.failure.error
    return outcome
