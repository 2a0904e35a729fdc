"""One block of one request: its greenlet, what it waits for, and what it keeps.

A task runs only while the runtime has switched to it, on the forward thread. It stops at a wait: for a step to begin,
for a location to be visited, or for the request's result. Grad and inference modes belong to the task: they are put
in place at each switch in and taken away at each switch out.
"""

from __future__ import annotations

import builtins
import contextvars
import enum
import linecache
import traceback
from typing import TYPE_CHECKING, Any

import torch
from greenlet import GreenletExit, greenlet

from actors.worker.blocks.errors import (
    BlockInterrupt,
    BlockTimeoutError,
)
from actors.worker.blocks.modes import enter_modes
from actors.worker.blocks.names import NAMED_NAME, SAVE_NAME
from actors.worker.blocks.wire import BlockCode, BlockFailure

if TYPE_CHECKING:
    from types import FrameType

    from actors.worker.blocks.runtime import BlockRuntime
    from actors.worker.blocks.sites import Site
    from actors.worker.blocks.visit import Visit

ATOMS = (int, float, complex, bool, str, bytes, type(None))
"""Types whose equal values may be one object, so that identity does not tell names apart."""


class Wait(enum.Enum):
    START = enum.auto()
    STEP = enum.auto()
    OPEN_STEP = enum.auto()
    """A step of a loop without an end: when the request is over, so is the loop."""
    LOCATION = enum.auto()
    RESULT = enum.auto()
    DONE = enum.auto()


class BlockTask:
    """See the module. `step` counts the request's steps from 0; -1 before the first."""

    def __init__(self, runtime: BlockRuntime, request_id: str, key: str, payload: Any, options: dict[str, Any]) -> None:
        self.runtime = runtime
        self.request_id = request_id
        self.key = key
        self.payload = payload
        self.write_back = not options.get("clone_reads", False)
        self.wait = Wait.START
        self.site: Site | None = None
        self.wanted_step = -1
        self.visit: Visit | None = None
        self.step = -1
        self.start = self.stop = self.slot = 0
        self.live_step = -1
        """The engine step that the request was last part of."""
        self.recording: list[Site] = []
        self.stopped = False
        self.cut: tuple[int, int] | None = None
        self.failure: BlockFailure | None = None
        self.value: Any = None
        self.saves: dict[str, Any] = {}
        self.location: str | None = None
        self._code: BlockCode | None = None
        self._names: dict[str, Any] = {}
        self._marked: dict[int, Any] = {}
        self._explicit: list[tuple[str, Any]] = []
        self._unnamed: list[tuple[Any, str | None, FrameType | None]] = []
        self._grad = False
        self._inference = False
        self._greenlet = greenlet(self._run)
        self._engine_side: Any = self._greenlet.parent
        self._greenlet.gr_context = contextvars.copy_context()

    @property
    def done(self) -> bool:
        return self.wait is Wait.DONE

    # -- engine side --------------------------------------------------------------------------------------------

    def resume(self, value: Any = None, *, throw: BaseException | None = None) -> None:
        """Let the block run until it waits or ends. Call within the runtime's block modes.

        Never raises what the block raises.
        """
        if throw is not None and self.wait is Wait.START:
            self.wait, self.payload = Wait.DONE, None
            if not isinstance(throw, GreenletExit):
                self.failure = self._describe(throw)
                self.runtime.ended_requests.add(self.request_id)
            return
        runtime = self.runtime
        watchdog = runtime.watchdog
        own_modes = enter_modes(self._grad, self._inference) if self._grad or self._inference else None
        before, runtime.current = runtime.current, self
        watchdog.arm()
        try:
            if throw is None:
                self._greenlet.switch(value)
            else:
                self._greenlet.throw(throw)
        finally:
            struck = watchdog.disarm()
            runtime.current = before
            grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            if own_modes is not None or grad or inference:
                self._grad, self._inference = grad, inference
                if own_modes is not None:
                    own_modes.__exit__(None, None, None)
                else:
                    runtime.modes.reset()
        if struck:
            runtime.time_limit_struck(self)
        if self.wait is Wait.DONE and (self.failure is not None or self.stopped):
            runtime.ended_requests.add(self.request_id)

    def kill(self) -> None:
        """Unwind a block that nobody waits for any more."""
        if self._greenlet and not self.done:
            self.resume(throw=GreenletExit())
        self.wait = Wait.DONE

    # -- block side ---------------------------------------------------------------------------------------------

    def park(self, wait: Wait) -> Any:
        """Yield to the engine until `wait` is over; what the engine sends is returned."""
        visit = self.visit
        if visit is not None:
            self.visit = None
            visit.close()
        self.wait = wait
        return self._engine_side.switch()

    def close_visit(self) -> None:
        visit = self.visit
        if visit is not None:
            self.visit = None
            visit.close()

    def mark(self, value: Any) -> Any:
        """`.save()` in a block's own text."""
        own = getattr(type(value), "save", None)
        if own is not None and not isinstance(value, torch.Tensor):
            return value.save()
        self._marked[id(value)] = value
        return value

    def mark_named(self, name: str, value: Any) -> None:
        if self._marked.get(id(value), _NOTHING) is value:
            self._explicit.append((name, value))

    def mark_call(self, value: Any, name: str | None, frame: FrameType | None) -> Any:
        """`harvest.save(value)`, called from `frame`."""
        self._marked[id(value)] = value
        if name is not None or self._code is None or self._code.code is None:
            self._unnamed.append((value, name, frame))
        return value

    def _run(self, _: Any = None) -> None:
        try:
            self._code = code = self.runtime.unpack_block(self.payload)
            self.payload = None
            if code.code is not None:
                self._run_body(code)
            else:
                self.value = self.runtime.call_function(code.function)
            self.close_visit()
        except GreenletExit:
            pass
        except BlockInterrupt:
            self._close_quietly()
        except (Exception, BlockTimeoutError, SystemExit) as error:
            self.visit = None
            self.failure = self._describe(error)
        finally:
            self._collect()
            self.wait = Wait.DONE

    def _run_body(self, code: BlockCode) -> None:
        self._names = {
            "__builtins__": builtins,
            **code.names,
            SAVE_NAME: self.mark,
            NAMED_NAME: self.mark_named,
        }
        for name in code.saved_names:
            self.mark(code.names[name])
        exec(code.load_code(), self._names)

    def _close_quietly(self) -> None:
        try:
            self.close_visit()
        except Exception as error:
            self.failure = self._describe(error)

    def _collect(self) -> None:
        for name, value in self._names.items():
            if not isinstance(value, ATOMS) and self._marked.get(id(value), _NOTHING) is value:
                self.saves[name] = value
        for name, value in self._explicit:
            if self._names.get(name, _NOTHING) is value:
                self.saves[name] = value
        for index, (value, given, frame) in enumerate(self._unnamed):
            names = [given] if given is not None else _names_of(value, frame)
            for name in names or [f"saved_{index}"]:
                self.saves[name] = value
        self._names = {}
        self._marked.clear()
        self._explicit.clear()
        self._unnamed.clear()

    def _describe(self, error: BaseException) -> BlockFailure:
        if isinstance(error, BlockTimeoutError) and not error.args:
            error.args = (
                f"the block ran longer than {self.runtime.watchdog.limit_s} s without reaching its next location; "
                "make it shorter, or raise VLLM(..., block_time_limit_s=...)",
            )
        filename = self._code.filename if self._code is not None else ""
        line = None
        frames = traceback.extract_tb(error.__traceback__)
        for frame in frames:
            if frame.filename == filename:
                line = frame.lineno
        if line is None and self._code is not None and self._code.code is not None:
            # Found when the block's last visit closed, after its last statement.
            line = max((last for _, _, last in self._code.load_code().co_lines() if last is not None), default=None)
        text = linecache.getline(filename, line).strip() if line is not None else ""
        own = [frame for frame in frames if not frame.filename.startswith(_HERE)]
        return BlockFailure(
            error=error,
            file=filename,
            line=line,
            text=text,
            location=self.location,
            step=max(self.step, 0),
            traceback="".join(traceback.format_list(own)) + "".join(traceback.format_exception_only(error)),
        )


_HERE = __file__.rpartition("task.py")[0]
_NOTHING = object()


def _names_of(value: Any, frame: FrameType | None) -> list[str]:
    if frame is None or isinstance(value, ATOMS):
        return []
    return [name for name, held in frame.f_locals.items() if held is value]
