"""A driver process and its writer processes over a scripted run, and a way to die at a chosen step.

No model, engine or cluster: what is under test is the path from rows to the ledger. Writers outlive a driver that is
killed, as engines on other machines would, and go on writing and sealing beside the next driver's.
"""

from __future__ import annotations

import os
import pickle
import random
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.commit import Committer
from storage.receipt import UnitReceipt
from storage.run_folder import RunFolder
from storage.testing import ScriptedRun

STEPS = ("open", "write", "pwrite", "ftruncate", "fsync", "rename", "mkdir", "unlink", "rmdir")
_REAL = {name: getattr(os, name) for name in STEPS}


@dataclass(frozen=True, kw_only=True)
class Death:
    """Kill `victim` ("driver" or "writer") at its `step`-th file operation, before, after or in the middle of it."""

    victim: str
    step: int
    when: str


def die_at(death: Death) -> None:
    """Arm this process: from here on file operations are counted, and the chosen one is the last."""
    count = 0

    def dying(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count != death.step:
                return real(*arguments, **named)
            if death.when == "after":
                real(*arguments, **named)
            elif death.when == "middle" and name in ("write", "pwrite"):
                fd, data, *rest = arguments
                real(fd, memoryview(data).cast("B")[: max(1, memoryview(data).nbytes // 2)], *rest)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("SIGKILL returns to nobody")

        return call

    for name in STEPS:
        setattr(os, name, dying(getattr(os, name), name))


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a forked child that ends without cleaning up anything of the parent's."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def write_attempt(script: ScriptedRun, path: Path, unit: int, attempt: int, answer: int, death: Death | None) -> None:
    """A writer: one attempt, its receipt sent through the pipe `answer`."""
    for name, real in _REAL.items():  # the driver's own death is not inherited
        setattr(os, name, real)
    if death is not None and death.victim == "writer":
        die_at(death)
    receipt = script.attempt(RunFolder.open(path), unit, attempt)
    try:
        _REAL["write"](answer, pickle.dumps(receipt))
    except BrokenPipeError:
        return  # the driver is dead; nobody wants the receipt


def drive(script: ScriptedRun, path: Path, death: Death | None, seed: int) -> None:
    """A driver: two writers at a time, dead writers' units again, groups of receipts published, then finalised.

    A `death` whose victim is a writer strikes the first writer that gets so far.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if death is not None and death.victim == "driver":
        die_at(death)
    rng = random.Random(seed)
    run = script.open_or_create(path)
    with Committer.open(run) as committer:
        left = sorted(set(range(script.n_units)) - committer.committed)
        rng.shuffle(left)
        writers: dict[int, tuple[int, int]] = {}  # pipe -> (process, unit)
        held: list[UnitReceipt] = []
        while left or writers or held:
            while left and len(writers) < 2:
                unit = left.pop()
                receive, send = os.pipe()
                attempt = committer.next_attempt(unit)
                pid = fork(lambda u=unit, a=attempt, s=send, d=death: write_attempt(script, path, u, a, s, d))  # type: ignore[misc]
                os.close(send)
                writers[receive] = (pid, unit)
            for receive in select.select(list(writers), [], [], 60)[0] if writers else []:
                content = b"".join(iter(lambda r=receive: os.read(r, 1 << 20), b""))  # type: ignore[misc]
                os.close(receive)
                pid, unit = writers.pop(receive)
                os.waitpid(pid, 0)
                if content:
                    held.append(pickle.loads(content))
                else:
                    left.append(unit)
                    with deaths_file(path).open("ab") as file:
                        file.write(b".")
                    if death is not None and death.victim == "writer":
                        death = None
            if held and (len(held) > 1 or not (left or writers) or rng.random() < 0.5):
                published = committer.publish(held)
                assert not published.refused, published.refused
                held = []
        committer.finalise()


def deaths_file(path: Path) -> Path:
    """Where drivers of the run at `path` count, a byte each, the writers that died."""
    return path.with_name(path.name + ".deaths")


def run_until_killed(script: ScriptedRun, path: Path, *, death: Death | None, after_s: float | None, seed: int) -> bool:
    """One driver's life; True where it ended by itself, having finished the run. `after_s` kills it from outside."""
    pid = fork(lambda: drive(script, path, death, seed))
    if after_s is not None:
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0, "the driver failed; its traceback is above"
    return True
