"""The CPU worker of an engine that serves blocks."""

from vllm.v1.worker.cpu_worker import CPUWorker

from actors.worker.blocks.runner import BlockWorkerMixin


class BlockCPUWorker(BlockWorkerMixin, CPUWorker):
    """vLLM's CPU worker, serving blocks."""
