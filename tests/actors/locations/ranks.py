"""Engines of one or two ranks whose every location can be watched; ranks are vLLM's own worker processes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams, TokensPrompt
from vllm.distributed import get_tp_group

from actors.worker.locations import Location, LocationError, describe_view, gather_full, resolve_in_view, view_model
from actors.worker.locations.families import ONCE, PER_LAYER
from tests.actors.locations.watching import watch
from tests.engines import open_engine


class WatchingWorker:
    """Mixed into vLLM's worker by name; its methods are called on all ranks."""

    def start_watching(self) -> dict[str, str]:
        """Watch every readable location of the model; the names of those refused, with the reason."""
        worker: Any = self
        model = worker.model_runner.get_model()
        view = view_model(model, worker.vllm_config)
        names = [*ONCE, *(f"{alias}.{layer}" for alias in PER_LAYER for layer in range(view.n_layers))]
        names += [f"{row.path}.{side.text}" for row in describe_view(view) for side in row.sides]
        self.locations: list[Location] = []
        refused: dict[str, str] = {}
        for name in names:
            try:
                self.locations.extend(resolve_in_view(view, [name]))
            except LocationError as error:
                refused[name] = str(error)
        self.watching = contextlib.ExitStack()
        self.rows = self.watching.enter_context(watch(model, self.locations))
        return refused

    def take_rows(self, n_rows: int) -> dict[str, tuple[str, Any]]:
        """Layout and full-width rows of the last pass by name of location; collective."""
        self.watching.close()
        group = get_tp_group()
        taken: dict[str, tuple[str, Any]] = {}
        for location in self.locations:
            rows = self.rows[location.name]
            rows = rows[: 1 if location.alias == "logits" else n_rows].float().contiguous()
            full = gather_full(location, rows, group)
            assert full.shape[1] == location.width, (location.name, full.shape)
            taken[location.name] = (location.layout.label, full.numpy())
        return taken


def rows_of_all_locations(
    model: Path, ids: Sequence[int], tp_size: int, **arguments: Any
) -> tuple[list[dict[str, tuple[str, Tensor]]], dict[str, str]]:
    """Rows of every location from each rank, and what was refused."""
    ranks = {"tensor_parallel_size": tp_size, "distributed_executor_backend": "mp"} if tp_size > 1 else {}
    with open_engine(
        model,
        skip_tokenizer_init=True,
        max_model_len=64,
        worker_extension_cls="tests.actors.locations.ranks.WatchingWorker",
        **ranks,
        **arguments,
    ) as llm:
        refused = llm.collective_rpc("start_watching")
        llm.generate(
            [TokensPrompt(prompt_token_ids=list(ids))],
            SamplingParams(temperature=0.0, max_tokens=1, detokenize=False),
            use_tqdm=False,
        )
        taken = llm.collective_rpc("take_rows", args=(len(ids),))
    by_rank = [{name: (label, torch.from_numpy(rows)) for name, (label, rows) in rank.items()} for rank in taken]
    return by_rank, refused[0]
