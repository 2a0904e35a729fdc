"""Two tensor-parallel ranks on two devices store what one stores: full width, in one rank's order, each once."""

from __future__ import annotations

import os

import pytest
import torch

from tests.gpu.rows_program import Settings, harvest_in_process
from tests.gpu.test_rows import ALL, assert_rows, errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two devices (or none: a dry run on CPU cores)"),
]
# On CPUs each rank needs cores of its own.
ENVIRONMENT = {} if torch.cuda.is_available() else {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("locations", "selection"),
    [
        pytest.param(ALL, {}, id="rows"),
        pytest.param(["logits"], {"select": "last"}, id="logits"),
        pytest.param(["residual.2", "k.1"], {"reduce": "mean"}, id="reduced"),
    ],
)
def test_two_ranks_store_what_one_stores(gpu_model, prompts, reference, tmp_path, locations, selection):
    prompts = prompts[:12]
    one, two = (
        harvest_in_process(
            Settings(
                model=str(gpu_model),
                prompts=prompts,
                locations=locations,
                selection=selection,
                engine={"tensor_parallel_size": ranks},
                environment=ENVIRONMENT if ranks > 1 else {},
            ),
            tmp_path / str(ranks),
        )
        for ranks in (1, 2)
    )
    for invoke in range(len(prompts)):
        assert one.positions[invoke] == two.positions[invoke]
        assert one.token_ids[invoke] == two.token_ids[invoke]
        assert one.rows[invoke].keys() == two.rows[invoke].keys()
        for name, rows in one.rows[invoke].items():
            assert errors(two.rows[invoke][name], rows).max() < 3e-2, (invoke, name)
    if not selection:
        assert_rows(two, prompts, reference)


def test_the_ranks_end_with_their_engine(gpu_model, prompts, tmp_path):
    """The program has ended, so its ranks must have too: nothing holds the device's memory."""
    settings = Settings(
        model=str(gpu_model),
        prompts=prompts[:2],
        locations=["residual.1"],
        engine={"tensor_parallel_size": 2},
        environment={**ENVIRONMENT, "HARVEST_TEST_MARK": str(tmp_path)},
    )
    harvest_in_process(settings, tmp_path)
    assert not _processes_with("HARVEST_TEST_MARK", str(tmp_path))


def _processes_with(name: str, value: str) -> list[int]:
    import psutil

    def has(process: psutil.Process) -> bool:
        try:
            return process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    return [process.pid for process in psutil.process_iter() if process.pid != os.getpid() and has(process)]
