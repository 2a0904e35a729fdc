"""StepRows from vLLM's V2 model runner (`vllm.v1.worker.gpu.model_runner`), the default on GPUs.

`prepare_inputs` runs for real batches only (dummy passes build their own batch) and returns an `InputBatch` whose host
arrays hold the final order, so no synchronisation is needed. Some versions pass the batch's execution descriptor under
another name or position; it is found by its `cg_mode`.
"""

from __future__ import annotations

from typing import Any

from actors.worker.harvester import Harvester
from actors.worker.step import StepRows


class HarvestV2Runner:
    """Mixin put before a V2 runner class."""

    harvester: Harvester

    def prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        batch = super().prepare_inputs(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        n_requests = batch.num_reqs
        step = StepRows.checked(
            request_ids=tuple(batch.req_ids),
            starts=batch.query_start_loc_np[: n_requests + 1],
            first_positions=self._first_positions(batch),
            scheduled=scheduler_output.num_scheduled_tokens,
        )
        self.harvester.graphed = _may_be_graphed((*args, *kwargs.values()))
        self.harvester.begin_step(step, batch.input_ids)
        return batch

    @staticmethod
    def _first_positions(batch: Any) -> Any:
        return batch.num_computed_tokens_np[: batch.num_reqs]


def _may_be_graphed(arguments: tuple[Any, ...]) -> bool:
    for argument in arguments:
        mode = getattr(argument, "cg_mode", None)
        if mode is not None:
            return bool(mode.name != "NONE")
    # Unknown descriptor: graphs cannot be ruled out.
    return True


def adapt(runner: Any, harvester: Harvester) -> None:
    """Turn a V2 runner into one that reports its steps to `harvester`."""
    cls = type(runner)
    runner.__class__ = type(f"Harvest{cls.__name__}", (HarvestV2Runner, cls), {})
    runner.harvester = harvester
