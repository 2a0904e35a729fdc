"""The harvesting worker of vLLM's GPU build."""

from vllm.v1.worker.gpu_worker import Worker

from actors.worker.worker_cls import HarvestWorkerMixin


class HarvestGPUWorker(HarvestWorkerMixin, Worker):
    """GPU worker with taps."""
