"""What `import harvest` offers, and what it costs."""

import subprocess
import sys

import harvest
from storage.reader import StoreReader


def test_importing_harvest_imports_nothing_heavy():
    code = "import sys, harvest; print([name for name in ('torch', 'vllm', 'ray', 'zarr') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    for name in harvest.__all__:
        assert callable(getattr(harvest, name)), name


def test_open_reads_a_run(tmp_path):
    from tests.chaos.drive import make_scripted_run

    run = make_scripted_run(tmp_path / "run", n_prompts=4, n_units=1)
    opened = harvest.open(run.path)
    assert isinstance(opened, StoreReader)
    assert [location.name for location in opened.locations] == ["residual.0", "residual.1"]
    assert opened.committed == set()
