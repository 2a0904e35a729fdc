"""Puts saved values into the caller's variables."""

from __future__ import annotations

import ctypes
import inspect
import sys
from types import FrameType
from typing import Any

_locals_to_fast = None
if sys.version_info < (3, 13):
    _locals_to_fast = ctypes.pythonapi.PyFrame_LocalsToFast
    _locals_to_fast.argtypes = (ctypes.py_object, ctypes.c_int)
    _locals_to_fast.restype = None


def assign_names(frame: FrameType, values: dict[str, Any]) -> None:
    """Bind `values` in `frame` as if it had assigned them itself.

    In a function a name is local when the function's code knows it as such, and global otherwise (``global x``).
    """
    if not values:
        return
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:
        frame.f_locals.update(values)
        return
    known = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    local = frame.f_locals
    written = False
    for name, value in values.items():
        if name in known:
            local[name] = value
            written = True
        else:
            frame.f_globals[name] = value
    if written and _locals_to_fast is not None:
        # Before 3.13 f_locals of a function is a copy; this writes it back.
        _locals_to_fast(frame, 0)
