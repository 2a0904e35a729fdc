"""StepRows from vLLM's V1 model runner (`vllm.v1.worker.gpu_model_runner`), which the CPU build uses.

Tested on vLLM 0.32.0 (CPU). The runner's batch order is final once `_prepare_inputs` has run; the order, the row counts
and the first positions are read there. Profiling and warm-up passes do not go through `_prepare_inputs`.
"""

from __future__ import annotations

from typing import Any

from actors.worker.harvester import Harvester
from actors.worker.step import StepRows


class HarvestV1Runner:
    """Mixin put before a V1 runner class."""

    harvester: Harvester

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        batch = self.input_batch  # type: ignore[attr-defined]
        n_requests = batch.num_reqs
        step = StepRows.checked(
            request_ids=tuple(batch.req_ids),
            starts=self.query_start_loc.np[: n_requests + 1],  # type: ignore[attr-defined]
            first_positions=batch.num_computed_tokens_cpu[:n_requests],
            scheduled=scheduler_output.num_scheduled_tokens,
        )
        self.harvester.begin_step(step, self.input_ids.gpu)  # type: ignore[attr-defined]
        return prepared

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        decided = super()._determine_batch_execution_and_padding(*args, **kwargs)  # type: ignore[misc]
        self.harvester.graphed = decided[0].name != "NONE"
        return decided


def adapt(runner: Any, harvester: Harvester) -> None:
    """Turn a V1 runner into one that reports its steps to `harvester`."""
    cls = type(runner)
    runner.__class__ = type(f"Harvest{cls.__name__}", (HarvestV1Runner, cls), {})
    runner.harvester = harvester
