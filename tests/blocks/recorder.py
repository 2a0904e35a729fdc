"""`with Recorder(...)`: takes its body from source and runs it apart, as a trace does, but here and without torch.

What the body saves comes back into the variables of the function around it.
"""

from __future__ import annotations

import builtins
import sys
from types import FrameType
from typing import Any

from actors.worker.blocks.names import NAMED_NAME, SAVE_NAME
from harvest.blocks.body import compile_body, values_of
from harvest.blocks.capture import BodySkipper, SkipBody, WithBody, find_body
from harvest.blocks.frames import assign_names


class Recorder:
    """See the module. `ran` says that the body ran apart; `body` is what was taken."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.ran = False
        self.body: WithBody | None = None
        self._saved: dict[int, Any] = {}
        self._frame: FrameType | None = None

    def __enter__(self) -> Recorder:
        self._frame = sys._getframe(1)
        self.body = find_body(self._frame)
        self._skipper = BodySkipper(self._frame, self.body.first)
        self._skipper.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        self._skipper.stop()
        if error is not None and not isinstance(error, SkipBody):
            return False
        assert self.body is not None
        assert self._frame is not None
        compiled = compile_body(self.body)
        names = {
            "__builtins__": builtins,
            **values_of(compiled.reads, self._frame),
            SAVE_NAME: self._save,
            NAMED_NAME: lambda name, value: None,
            "APART": True,
        }
        exec(compiled.code, names)
        self.ran = True
        assign_names(self._frame, {name: value for name, value in names.items() if id(value) in self._saved})
        self._frame = None
        return True

    def _save(self, value: Any) -> Any:
        self._saved[id(value)] = value
        return value


APART = False
"""True inside a body that runs apart."""
