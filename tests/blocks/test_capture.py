"""Bodies of `with` statements in every place where Python lets one write them.

`python -m tests.blocks.test_capture` runs these tests without pytest, which is how other Python versions run them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import linecache
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harvest.blocks.errors import SourceError
from tests.blocks.recorder import APART, Recorder

ROOT = Path(__file__).parents[2]
LEVEL = 3
with Recorder() as at_module_level:
    module_saved = [LEVEL, APART].save()


def test_at_module_level() -> None:
    assert at_module_level.ran
    assert module_saved == [3, True]


def test_in_a_function_the_body_runs_apart_only() -> None:
    log: list[str] = []
    with Recorder() as recorder:
        log.append("apart" if APART else "in place")
        kept = [1].save()
        unsaved = 2
    assert recorder.ran
    assert log == ["apart"]
    assert kept == [1]
    assert "unsaved" not in locals()


def test_a_body_on_the_line_of_its_with() -> None:
    log: list[bool] = []
    # fmt: off
    with Recorder(): log.append(APART); kept = [2].save()  # noqa: E701, E702
    # fmt: on
    assert log == [True]
    assert kept == [2]


def test_existing_variables_are_read_and_rebound() -> None:
    number, kept = 5, None
    with Recorder():
        kept = [number + 1].save()
    assert kept == [6]


def test_in_a_method() -> None:
    class Owner:
        def __init__(self) -> None:
            self.number = 4

        def go(self) -> list[int]:
            with Recorder():
                kept = [self.number].save()
            return kept

    assert Owner().go() == [4]


def test_private_names_of_a_class() -> None:
    class _Owner:
        __factor = 3

        def __init__(self) -> None:
            self.__number = 4

        def go(self) -> list[int]:
            __local = 1
            with Recorder():
                __kept = [self.__number * _Owner.__factor + __local].save()
            return __kept

    assert _Owner().go() == [13]


def test_in_a_coroutine() -> None:
    async def go() -> list[bool]:
        with Recorder():
            kept = [APART].save()
        return kept

    assert asyncio.run(go()) == [True]


def test_in_a_class_body() -> None:
    class Holder:
        number = 7
        with Recorder():
            kept = [number].save()

    assert Holder.kept == [7]


def test_in_a_loop_each_time_anew() -> None:
    found = []
    for number in range(3):
        with Recorder():
            kept = [number].save()
        found.append(kept)
    assert found == [[0], [1], [2]]


def test_in_a_generator() -> None:
    def numbers() -> Iterator[list[int]]:
        for number in range(2):
            with Recorder():
                kept = [number].save()
            yield kept

    assert list(numbers()) == [[0], [1]]


def test_with_closures() -> None:
    outer = 10

    def inner() -> list[int]:
        with Recorder():
            kept = [outer + LEVEL].save()
        return kept

    assert inner() == [13]

    def make() -> Callable[[], list[int]]:
        kept: list[int] = []

        def read() -> list[int]:
            return kept

        with Recorder():
            kept = [1].save()
        return read

    assert make()() == [1]


def test_functions_and_comprehensions_inside_a_body_see_its_names() -> None:
    base = 100
    with Recorder():
        offset = 1

        def add(value: int) -> int:
            return value + offset + base

        kept = [add(value) for value in range(2) if (lambda number: number >= offset - 1)(value)].save()
    assert kept == [101, 102]


def test_several_contexts_in_one_statement() -> None:
    log: list[str] = []

    @contextlib.contextmanager
    def noted(name: str) -> Iterator[str]:
        log.append(f"{name} {APART}")
        yield name

    with noted("first") as first, Recorder(), noted("second") as second:
        kept = [first, second].save()
    assert kept == ["first", "second"]
    assert log == ["first False", "second False"]


def test_over_several_lines() -> None:
    with Recorder(
        1,
        2,
    ) as recorder:
        # a comment first
        kept = [
            APART,
        ].save()
    assert recorder.ran
    assert kept == [True]
    assert recorder.body is not None
    assert recorder.body.text.strip().startswith("kept = [")


def test_a_body_that_does_nothing() -> None:
    with Recorder() as recorder:
        pass
    with Recorder() as other:
        "a text"
    assert recorder.ran
    assert other.ran


def test_a_body_that_begins_with_a_decorator() -> None:
    calls: list[Callable[[], int]] = []

    def keep(function: Callable[[], int]) -> Callable[[], int]:
        calls.append(function)
        return function

    with Recorder():

        @keep
        def number() -> int:
            return 3

        kept = [number()].save()
    assert kept == [3]
    assert len(calls) == 1


def test_global_names() -> None:
    def go() -> None:
        global _bound_globally
        with Recorder():
            _bound_globally = ["yes"].save()

    go()
    assert _bound_globally == ["yes"]


_bound_globally: list[str] = []


def test_errors_of_the_body_carry_its_line() -> None:
    try:
        with Recorder():
            number = 1
            number = number / 0
    except ZeroDivisionError as error:
        frames = []
        trace = error.__traceback__
        while trace is not None:
            frames.append((trace.tb_frame.f_code.co_filename, linecache.getline(__file__, trace.tb_lineno).strip()))
            trace = trace.tb_next
        assert (__file__, "number = number / 0") in frames
    else:
        raise AssertionError("no error")


def test_under_a_tracer_and_a_debugger() -> None:
    # In a process of its own: what other tests have left running must not be traced.
    code = "from tests.blocks.traced import *; check_that_a_tracer_is_put_back(); check_a_debugger()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_refused_statements_name_their_line() -> None:
    def returns() -> int:
        with Recorder():
            return 1
        return 2

    def yields() -> Iterator[int]:
        with Recorder():
            yield 1

    def breaks() -> None:
        for _ in range(2):
            with Recorder():
                break

    for function, word in ((returns, "return"), (lambda: list(yields()), "yield"), (breaks, "break")):
        try:
            function()
        except SourceError as error:
            assert word in str(error)
            assert "test_capture.py:" in str(error)
        else:
            raise AssertionError(word)


def test_loops_inside_a_body_may_break() -> None:
    with Recorder():
        kept = [].save()
        for number in range(5):
            if number == 2:
                break
            kept.append(number)
    assert kept == [0, 1]


def test_without_source_the_error_points_to_the_function_form() -> None:
    try:
        exec(compile("with Recorder():\n    pass", "<made up>", "exec"), {"Recorder": Recorder})
    except SourceError as error:
        assert "model.run(function" in str(error)
    else:
        raise AssertionError("no error")


def test_entered_without_with() -> None:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(Recorder())
        except SourceError as error:
            assert "with" in str(error)
        else:
            raise AssertionError("no error")


def test_notebook_cells_have_their_source_in_linecache() -> None:
    cell = "x = 4\nwith Recorder() as r:\n    kept = [x].save()\n"
    name = "<ipython-input-1-abc>"
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"Recorder": Recorder}
    exec(compile(cell, name, "exec"), scope)
    assert scope["kept"] == [4]
    assert scope["r"].ran


def test_a_file_changed_after_import_is_noticed() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "changing.py"
        path.write_text("def go(Recorder):\n    with Recorder():\n        first = [1].save()\n    return first\n")
        spec = importlib.util.spec_from_file_location("changing", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        path.write_text("def go(Recorder):\n    with Recorder():\n        second = [1].save()\n    return second\n")
        try:
            module.go(Recorder)
        except SourceError as error:
            assert "changed after it was imported" in str(error)
        else:
            raise AssertionError("no error")


_COMMAND = """
from tests.blocks.recorder import Recorder
x = 1
with Recorder() as r: kept = [x, 2].save()
def f():
    y = 3
    with Recorder():
        inside = [x, y].save()
    return inside
print(kept, f())
"""


def test_python_dash_c() -> None:
    for flags in (["-c"], ["-Bc"], ["-W", "ignore", "-X", "dev", "-c"]):
        found = subprocess.run(
            [sys.executable, *flags, _COMMAND], cwd=ROOT, capture_output=True, text=True, check=True, env=_environment()
        )
        assert found.stdout.strip() == "[1, 2] [1, 3]"


def test_a_plain_repl_is_refused_or_served() -> None:
    program = (
        "from tests.blocks.recorder import Recorder\nwith Recorder():\n    kept = [1].save()\n\nprint('kept', kept)\n"
    )
    found = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=program,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=_environment(),
    )
    assert "kept [1]" in found.stdout or "model.run(function" in found.stderr


def test_other_python_versions() -> None:
    tried = []
    for python in _other_pythons():
        found = subprocess.run(
            [python, "-m", "tests.blocks.test_capture"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            env=_environment(),
        )
        assert found.returncode == 0, found.stdout + found.stderr
        tried.append(found.stdout.split()[0])
    if not tried and "pytest" in sys.modules:
        sys.modules["pytest"].skip("no other Python from 3.11 on is installed")
    print("also ran on", tried)


def _other_pythons() -> list[str]:
    candidates = [shutil.which(f"python3.{minor}") for minor in range(11, 15)]
    candidates += [str(path) for path in Path.home().glob(".pyenv/versions/3.1[1-9]*/bin/python")]
    candidates += [str(path) for path in Path.home().glob(".local/share/uv/python/cpython-3.1[1-9]*/bin/python3")]
    found: dict[str, str] = {}
    for candidate in candidates:
        if candidate is None:
            continue
        asked = subprocess.run(
            [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        version = asked.stdout.strip()
        mine = f"{sys.version_info[0]}.{sys.version_info[1]}"
        if asked.returncode == 0 and version != mine and int(version.partition(".")[2]) >= 11:
            found.setdefault(version, candidate)
    return list(found.values())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def main() -> None:
    tests = {name: value for name, value in globals().items() if name.startswith("test_") and "other" not in name}
    for test in tests.values():
        test()
    print(f"{sys.version_info[0]}.{sys.version_info[1]}: {len(tests)} passed")


if __name__ == "__main__":
    main()
