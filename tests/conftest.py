"""What all tests share: the environment of vLLM and Ray on a CPU, tiny models, the demo text, one Ray cluster.

The environment is set before anything imports vLLM or Ray; a test that needs another value sets it for its own process
tree (`monkeypatch.setenv`, `subprocess.run(env=...)`).
"""

from __future__ import annotations

import os

os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",  # a forked child of a threaded tokenizer would warn, and may hang
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: quick, and debuggable
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Test processes share the cores: threads bound to the same cores, or spinning on them, make every engine crawl.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from collections.abc import Iterator
from pathlib import Path

import pytest

from harvest.demo_text import write_demo_text
from harvest.models import get_model


@pytest.fixture(scope="session")
def demo_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's dataset: JSON lines with `id` and `text`."""
    path = tmp_path_factory.mktemp("demo") / "demo-text.jsonl"
    write_demo_text(path)
    return path


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen3 model: 4 layers, width 128, 4 heads of 32, 2 KV heads, vocabulary 1024, float32."""
    from tests.tiny_models import make_tiny_model

    return make_tiny_model("qwen3", tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama model of the same shape as `tiny_qwen3`."""
    from tests.tiny_models import make_tiny_model

    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, downloaded once into the user's cache."""
    return get_model("smollm2-135m")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of this test process alone; mark tests that use it with `ray`."""
    import ray

    ray.init(
        address="local",
        num_cpus=8,  # logical: so many actors may be alive, whatever the cores
        resources={"engine": 8},
        include_dashboard=False,
        object_store_memory=200_000_000,
        logging_level="warning",
        log_to_driver=False,
    )
    yield
    ray.shutdown()
