"""EngineActor: the Ray actor that owns one vLLM engine.

The engine runs in a thread of its own (`Feeder`), so that pings and statistics are answered during a step. The actor
ends itself when the engine breaks (an error would otherwise leave a live actor with a dead engine) and when the process
that started it is gone, or its driver silent: no engine outlives its driver.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import ray

from actors.feeder import Feeder, LlmLike, PlannedInvoke, read_planned
from actors.lora import read_adapter
from actors.model_files import check_model
from actors.origin import check_origin
from actors.processes import ProcessId, end_tree, own_process
from actors.protocol import EngineSpec, EngineStats, Lease, Receipt, UnitFailure
from storage.plan_files import PlanReader

_PARENT_CHECK_S = 1.0


class EngineActor:
    """See `actors.protocol.Engine`. Made into a Ray actor by the driver's pool."""

    def __init__(self, spec: EngineSpec, origin: str) -> None:
        check_origin(origin)
        self._spec = spec
        self._plan = PlanReader(Path(spec.run_path) / "plan")
        self._feeder: Feeder | None = None
        self._heard_s = time.monotonic()
        self._parent_pid = os.getppid()
        threading.Thread(target=self._watch, name="harvest-watch", daemon=True).start()

    async def start(self) -> EngineStats:
        """Build the engine; returns when it can serve."""
        return await asyncio.to_thread(self._start)

    def _start(self) -> EngineStats:
        self._feeder = Feeder(self._make_llm(), self._spec, self._read_unit)
        threading.Thread(target=self._run, name="harvest-engine", daemon=True).start()
        return self._feeder.stats

    def _make_llm(self) -> LlmLike:
        check_model(self._spec.model, self._spec.model_sha256)
        if self._spec.lora is not None:
            read_adapter(self._spec.lora).check(self._spec.lora_sha256)
        if self._spec.fake is not None:
            from actors.fake_engine import Script, ScriptedLlm

            return ScriptedLlm(self._spec, Script(**self._spec.fake))
        from actors.worker.llm import Llm

        return Llm(self._spec)

    def _run(self) -> None:
        assert self._feeder is not None
        try:
            self._feeder.run()
        except BaseException:
            import traceback

            traceback.print_exc()
            # The futures carry the error to the driver; let the replies leave before the process ends.
            time.sleep(2.0)
            end_tree(psutil.Process())

    def _read_unit(self, unit: int) -> Iterator[PlannedInvoke]:
        return read_planned(self._plan, unit, unit_rows=self._spec.layout.unit_rows)

    async def run_unit(self, lease: Lease) -> Receipt | UnitFailure:
        """Harvest one unit into its attempt's staged files and seal them."""
        assert self._feeder is not None, "start() first"
        return await asyncio.wrap_future(self._feeder.submit(lease))

    async def stats(self) -> EngineStats:
        """Counters, at once."""
        return self._feeder.stats if self._feeder is not None else EngineStats(pid=os.getpid())

    async def hear(self) -> None:
        """The driver lives."""
        self._heard_s = time.monotonic()

    async def process(self) -> ProcessId:
        """Which process this is, for when it no longer answers."""
        return own_process(ray.get_runtime_context().get_node_id())

    def _watch(self) -> None:
        while True:
            time.sleep(_PARENT_CHECK_S)
            silence_s = time.monotonic() - self._heard_s
            if os.getppid() != self._parent_pid or silence_s > self._spec.driver_silence_s:
                end_tree(psutil.Process())
