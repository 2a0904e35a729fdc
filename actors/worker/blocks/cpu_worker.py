"""The CPU worker of an engine that serves blocks."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from actors.worker.blocks.runner import BlocksV1Mixin, BlockWorkerMixin

CONFIG_KEY = "harvest_blocks"


class BlockCPUModelRunner(BlocksV1Mixin, CPUModelRunner):
    pass


class BlockCPUWorker(BlockWorkerMixin, CPUWorker):
    """vLLM's CPU worker with the V1 runner that drives blocks."""

    def init_device(self) -> None:
        super().init_device()
        if type(self.model_runner) is not CPUModelRunner:
            raise RuntimeError(f"blocks on CPU need vLLM's V1 runner, not {type(self.model_runner).__name__}")
        self.model_runner.__class__ = BlockCPUModelRunner

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        options = (self.vllm_config.additional_config or {}).get(CONFIG_KEY, {})
        self.model_runner.install_blocks(block_time_limit_s=options.get("block_time_limit_s"))
