"""Capture under a trace function, for processes of their own."""

from __future__ import annotations

import bdb
import sys
from typing import Any

from tests.blocks.recorder import APART, Recorder


def check_that_a_tracer_is_put_back() -> None:
    events: list[str] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_name == "traced":
            events.append(event)
        return trace

    def traced() -> list[bool]:
        with Recorder():
            kept = [APART].save()
        return kept

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        kept = traced()
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert kept == [True]
    assert events[-1] == "return"


def check_a_debugger() -> None:
    class Stepper(bdb.Bdb):
        def user_line(self, frame: Any) -> None:
            self.set_step()

    def debugged() -> list[bool]:
        with Recorder():
            kept = [APART].save()
        return kept

    before = sys.gettrace()
    try:
        assert Stepper().runcall(debugged) == [True]
    finally:
        sys.settrace(before)
