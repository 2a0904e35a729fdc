"""The mixin that makes a vLLM worker a harvesting worker; `worker_cpu` and `worker_gpu` put it on vLLM's classes.

vLLM takes the class by its dotted name (`worker_cls`), in the engine's process for one rank and in a child process per
rank under tensor parallelism. The EngineSpec travels as vLLM's `additional_config`, whose hash is part of the compile
cache
key: an artifact compiled with other taps is never loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.protocol import InvokeOutcome
from actors.worker import runner_v1, runner_v2
from actors.worker.harvester import Harvester
from actors.worker.lora import unapplied_weights


class HarvestWorkerMixin:
    """Installs the harvester and forwards the worker's life cycle to it."""

    harvester: Harvester
    model_runner: Any

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        self.harvester = Harvester(
            config.additional_config,
            device=self.device,  # type: ignore[attr-defined]
            rank=self.rank,  # type: ignore[attr-defined]
            tp_size=config.parallel_config.tensor_parallel_size,
            static_rows=_largest_captured_rows(config),
        )
        runner = self.model_runner
        (runner_v2 if hasattr(runner, "prepare_inputs") else runner_v1).adapt(runner, self.harvester)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        context = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        self.harvester.install(self.model_runner.get_model(), context)

    def execute_model(self, scheduler_output: Any) -> Any:
        # A step that sampled nothing has not been ended by sample_tokens.
        self.harvester.end_step()
        self.harvester.register(scheduler_output)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        sampled = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        self.harvester.end_step()
        return sampled

    def shutdown(self) -> None:
        if hasattr(self, "harvester"):
            self.harvester.close()
        super().shutdown()  # type: ignore[misc]

    # Called through collective_rpc by name.

    def harvest_begin_unit(self, unit: int, attempt: int) -> None:
        """See Harvester.begin_unit."""
        self.harvester.begin_unit(unit, attempt)

    def harvest_seal_unit(self, unit: int, attempt: int, outcomes: Sequence[InvokeOutcome]) -> None:
        """See Harvester.seal_unit."""
        self.harvester.end_step()
        self.harvester.seal_unit(unit, attempt, outcomes)

    def harvest_abort_unit(self, unit: int, attempt: int) -> None:
        """See Harvester.abort_unit."""
        self.harvester.abort_unit(unit, attempt)

    def harvest_end_self_test(self) -> list[str]:
        """See Harvester.end_self_test."""
        self.harvester.end_step()
        return self.harvester.end_self_test()

    def harvest_unapplied_weights(self) -> list[str]:
        """See lora.unapplied_weights."""
        return unapplied_weights(self.model_runner.get_model(), self.harvester.depth)

    def harvest_poll(self) -> Any:
        """See Harvester.poll."""
        return self.harvester.poll()


def _largest_captured_rows(config: Any) -> int:
    sizes = config.compilation_config.cudagraph_capture_sizes
    mode = config.compilation_config.cudagraph_mode
    if not sizes or mode is None or mode.name == "NONE" or config.model_config.enforce_eager:
        return 0
    return int(max(sizes))
