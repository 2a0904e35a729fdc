"""The harvesting worker of vLLM's CPU build."""

from vllm.v1.worker.cpu_worker import CPUWorker

from actors.worker.worker_cls import HarvestWorkerMixin


class HarvestCPUWorker(HarvestWorkerMixin, CPUWorker):
    """CPU worker with taps."""
