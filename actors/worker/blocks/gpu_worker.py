"""The GPU worker of an engine that serves blocks."""

from vllm.v1.worker.gpu_worker import Worker

from actors.worker.blocks.runner import BlockWorkerMixin


class BlockGPUWorker(BlockWorkerMixin, Worker):
    """vLLM's GPU worker, serving blocks."""
