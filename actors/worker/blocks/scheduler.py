"""The scheduler of an engine that serves blocks.

A preempted request would rebuild its KV without the block's edits, so requests are admitted only while the KV cache
holds the whole of every running one (prompt and `max_tokens`); the rest wait. Requests whose block failed or called
``tracer.stop()`` end after the step in which that happened, also under ``ignore_eos`` or ``min_tokens``.
"""

from __future__ import annotations

from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from actors.worker.blocks.runner import ENDED_ATTRIBUTE


class BlockScheduler(Scheduler):
    """See the module."""

    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slots = self.max_num_active_reqs

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.max_num_active_reqs = min(self._slots, len(self.running) + self._n_admissible())
        return super().schedule(*args, **kwargs)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        for request_id in getattr(model_runner_output, ENDED_ATTRIBUTE, ()):
            request = self.requests.get(request_id)
            if request is not None:
                request.max_tokens = request.num_output_tokens + 1
        return super().update_from_output(scheduler_output, model_runner_output)

    def _n_admissible(self) -> int:
        """How many waiting requests, from the front, fit beside the running ones for their whole life."""
        if not self.waiting:
            return 0
        # One block is vLLM's null block.
        n_free = self.kv_cache_config.num_blocks - 1 - sum(self._n_blocks(request) for request in self.running)
        n_admissible = 0
        for request in self.waiting:
            n_free -= self._n_blocks(request)
            if n_free < 0 and (self.running or n_admissible):
                break
            n_admissible += 1
        return n_admissible

    def _n_blocks(self, request: Request) -> int:
        """KV blocks that the request takes at most, over all cache groups."""
        n_tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        return sum(
            cdiv(n_tokens, manager.block_size) for manager in self.kv_cache_manager.coordinator.single_type_managers
        )
