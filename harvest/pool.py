"""EnginePool: the engine actors of a run. Spawns, watches and ends them; the only module that calls Ray for engines.

Invariants:
- Ray restarts nothing (`max_restarts=0`): a death is known at once, and the driver spawns the next generation;
- a generation's name is never used again, so that a late message cannot be taken for its successor's;
- an actor's death ends all its refs; it is reported once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.engine import EngineActor
from actors.origin import package_origin
from actors.processes import ProcessId, end_process
from actors.protocol import EngineSpec, EngineStats, Lease, Receipt, UnitFailure
from harvest.heartbeat import Heartbeat

# How often engines hear of the driver in the time after which they give it up.
BEATS_IN_SILENCE = 6
# How long a node may take to end an engine of its own.
END_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReady:
    """An engine can take leases."""

    engine: str
    stats: EngineStats


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLost:
    """An engine is gone."""

    engine: str
    reason: str
    started: bool
    """False when it died before it was ready."""
    stalled: bool = False
    """It was given up while its process lived."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAnswered:
    """An engine has told its counters."""

    engine: str
    stats: EngineStats


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitEnded:
    """A lease has a receipt or a failure."""

    engine: str
    lease: Lease
    result: Receipt | UnitFailure


PoolEvent = EngineReady | EngineAnswered | EngineLost | UnitEnded


@dataclass(kw_only=True, slots=True)
class _Member:
    handle: Any
    process: Any
    """Ref of its `ProcessId`."""
    ready: bool = False


class EnginePool:
    """See the module's docstring.

    Args:
        spec: what each engine is made from.
        count: engines to keep.
        cpus: CPUs that Ray reserves for each.
    """

    def __init__(self, spec: EngineSpec, *, count: int, cpus: float) -> None:
        self._spec = spec
        self._count = count
        self._cpus = cpus
        self._on_gpu = ray.cluster_resources().get("GPU", 0) > 0
        self._gpus = spec.tensor_parallel_size if self._on_gpu else 0
        self._origin = package_origin()
        self._members: dict[str, _Member] = {}
        self._starting: dict[Any, str] = {}
        self._running: dict[Any, tuple[str, Lease]] = {}
        self._asked: dict[Any, str] = {}
        self._stats: dict[str, EngineStats] = {}
        self._generation = 0
        self._heartbeat = Heartbeat(self._tell_alive, interval_s=spec.driver_silence_s / BEATS_IN_SILENCE)

    def _tell_alive(self) -> None:
        for member in list(self._members.values()):
            member.handle.hear.options(num_returns=0).remote()

    @property
    def ready(self) -> list[str]:
        """Engines that take leases."""
        return [name for name, member in self._members.items() if member.ready]

    @property
    def room(self) -> int:
        """Engines for which the cluster's nodes have room now, `count` at most."""
        return count_room(ray.nodes(), cpus=self._cpus, gpus=self._gpus, most=self._count)

    def fill(self) -> list[str]:
        """Spawn engines until `count` live or start; the names of the new ones."""
        spawned = []
        while len(self._members) < self._count:
            name = f"engine-{self._generation}"
            self._generation += 1
            handle = (
                ray.remote(EngineActor)
                .options(
                    num_cpus=self._cpus,
                    num_gpus=self._gpus,
                    max_restarts=0,
                    max_task_retries=0,
                    max_concurrency=1000,
                    runtime_env={"env_vars": self._environment()},
                )
                .remote(self._spec, self._origin)
            )
            self._starting[handle.start.remote()] = name
            self._members[name] = _Member(handle=handle, process=handle.process.remote())
            spawned.append(name)
        return spawned

    def _environment(self) -> dict[str, str]:
        environment = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
        if not self._on_gpu:
            # Ray would give an actor one thread; the engines of a machine share its cores.
            threads = max(1, (os.cpu_count() or 1) // self._count)
            environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
            if self._count > 1 and self._spec.tensor_parallel_size == 1:
                environment["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        return environment

    def submit(self, engine: str, lease: Lease) -> None:
        """Give a lease to an engine."""
        self._running[self._members[engine].handle.run_unit.remote(lease)] = (engine, lease)

    def wait(self, timeout_s: float) -> list[PoolEvent]:
        """What has happened, after at most `timeout_s`."""
        refs = [*self._starting, *self._running, *self._asked]
        if not refs:
            return []
        # One ref at a time would cost a second each; waiting for any one returns as soon as something is there.
        done, _ = ray.wait(refs, num_returns=1, timeout=timeout_s)
        if done:
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        events: list[PoolEvent] = []
        for ref in done:
            event = self._settle(ref)
            if event is not None:
                events.append(event)
        return events

    def _settle(self, ref: Any) -> PoolEvent | None:
        starting = self._starting.pop(ref, None)
        running = self._running.pop(ref, None)
        asked = self._asked.pop(ref, None)
        name = starting or asked or (running[0] if running else "")
        if name not in self._members:
            return None
        try:
            value = ray.get(ref)
        except Exception as error:
            # Ray's errors, and whatever the engine's own code raised: either way it cannot go on.
            return self._lose(name, error)
        if starting is not None:
            self._members[name].ready = True
            return EngineReady(engine=name, stats=value)
        if running is not None:
            return UnitEnded(engine=name, lease=running[1], result=value)
        self._stats[name] = value
        return EngineAnswered(engine=name, stats=value)

    def give_up(self, reasons: Mapping[str, str]) -> list[EngineLost]:
        """End engines whose processes live but do not work, with the ranks that they started.

        Args:
            reasons: why, of each engine.
        """
        members = {name: self._members.pop(name) for name in reasons}
        self._stats = {name: stats for name, stats in self._stats.items() if name not in members}
        # Calls to a process that cannot be reached may never end; nobody waits for them any more.
        self._asked = {ref: name for ref, name in self._asked.items() if name not in members}
        self._running = {ref: held for ref, held in self._running.items() if held[0] not in members}
        # All at once: while the driver waits, the engines that work hear nothing of it.
        ends = [end for member in members.values() for end in _end_on_its_node(member)]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=END_S)
        for member in members.values():
            ray.kill(member.handle)
        return [
            EngineLost(engine=name, reason=reasons[name], started=member.ready, stalled=True)
            for name, member in members.items()
        ]

    def _lose(self, name: str, error: BaseException) -> EngineLost:
        member = self._members.pop(name)
        self._stats.pop(name, None)
        # A broken engine may still live as a process.
        ray.kill(member.handle)
        return EngineLost(engine=name, reason=_first_lines(error), started=member.ready)

    def ask_stats(self) -> dict[str, EngineStats]:
        """The newest counters of each engine; asks for newer ones, which come with a later `wait`."""
        asked = set(self._asked.values())
        for name, member in self._members.items():
            if name not in asked:
                self._asked[member.handle.stats.remote()] = name
        return dict(self._stats)

    def final_stats(self, timeout_s: float) -> dict[str, EngineStats]:
        """Counters of each engine as of now; the newest known ones where it does not answer in time."""
        asked = {member.handle.stats.remote(): name for name, member in self._members.items()}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
        for ref in done:
            try:
                self._stats[asked[ref]] = ray.get(ref)
            except RayError:
                continue  # it has just died; what it last said stays
        return dict(self._stats)

    def close(self) -> None:
        """End all engines."""
        self._heartbeat.stop()
        for member in self._members.values():
            ray.kill(member.handle)
        self._members.clear()


def count_room(nodes: Iterable[Mapping[str, Any]], *, cpus: float, gpus: float, most: int) -> int:
    """Engines that fit on the nodes of a cluster if nothing else does.

    Args:
        nodes: as `ray.nodes` lists them.
        cpus: of one engine.
        gpus: of one engine, all on one node.
        most: the answer where there are more.
    """
    needs = [(name, amount) for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount]
    room = 0
    for node in nodes:
        if node["Alive"]:
            room += min((math.floor(node["Resources"].get(name, 0) / amount) for name, amount in needs), default=most)
    return min(room, most)


def _end_on_its_node(member: _Member) -> list[Any]:
    """Ref of the end of an engine that was ready: `ray.kill` asks the actor first, and may leave its ranks behind."""
    try:
        process: ProcessId = ray.get(member.process, timeout=0)
    except RayError:
        return []  # the actor is dead by now
    on_its_node = NodeAffinitySchedulingStrategy(node_id=process.node, soft=False)
    end = ray.remote(end_process).options(num_cpus=0, max_retries=0, scheduling_strategy=on_its_node)
    return [end.remote(process)]


def _first_lines(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip() or repr(cause)
    lines = [line for line in text.splitlines() if line.strip()]
    return f"{type(cause).__name__}: " + " | ".join(lines[:3] if len(lines) <= 3 else [lines[0], *lines[-2:]])[:2000]
