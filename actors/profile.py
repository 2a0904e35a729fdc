"""Where an engine's time goes: sums of seconds by stage, always counted, as values that add up.

The engine's thread is in exactly one of `MAIN_STAGES` at any moment, so their seconds add up to its wall-clock time.
What other threads and the device do at the same time is counted beside it and overlaps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

Stage = Literal["plan", "feed", "forward", "settle", "gated", "sealing", "idle"]
MAIN_STAGES = ("start", "plan", "feed", "forward", "snapshot", "settle", "gated", "sealing", "idle")
SEALERS = 2
"""Threads of one rank that seal units."""
# Not sums over time: what one engine has, the same for all engines of a run.
_EQUAL = ("writers", "sealers")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTimes:
    """What one rank has counted since it began to serve; seconds."""

    n_steps: int = 0
    """Steps with rows of requests."""
    n_step_tokens: int = 0
    """Tokens that these steps computed."""
    snapshot_s: float = 0.0
    device_forward_s: float = 0.0
    device_snapshot_s: float = 0.0
    copy_s: float = 0.0
    copy_wait_s: float = 0.0
    write_s: float = 0.0
    seal_s: float = 0.0
    n_sealed_files: int = 0
    """Shard files that were sealed, those of units whose other files are still being sealed included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineProfile:
    """Seconds of one engine by stage, or with `+` of several engines together."""

    start_s: float = 0.0
    """From the actor's start until the engine served."""
    plan_s: float = 0.0
    """Reading leased units of the plan."""
    feed_s: float = 0.0
    """Adding requests."""
    forward_s: float = 0.0
    """The engine's steps on the host, without the snapshot. On a GPU it includes the wait for the device."""
    snapshot_s: float = 0.0
    """In steps: choosing and gathering the wanted rows, starting their copies. On a CPU the copying itself."""
    settle_s: float = 0.0
    """Ending requests, asking the sinks, handing out receipts."""
    gated_s: float = 0.0
    """Waiting with work to do, because rows on their way to disk filled the ring."""
    sealing_s: float = 0.0
    """Waiting without work to do, while units were sealed."""
    idle_s: float = 0.0
    """Waiting for a lease."""
    device_forward_s: float = 0.0
    """Device: from the start of each pass to the end of its sampling. Only with `EngineSpec.profile`, on a GPU."""
    device_snapshot_s: float = 0.0
    """Device: gathering the wanted rows after each pass. Only with `EngineSpec.profile`, on a GPU."""
    copy_s: float = 0.0
    """Copy stream: device to host. Only with `EngineSpec.profile`, on a GPU."""
    copy_wait_s: float = 0.0
    """Writer threads: waiting for such copies."""
    write_s: float = 0.0
    """Writer threads: checksums, statistics, writing to shard files."""
    seal_s: float = 0.0
    """Sealing threads: last writes, footers, fsync."""
    commit_s: float = 0.0
    """Driver: renaming this engine's files, receipts and ledger, with fsync."""
    n_steps: int = 0
    n_step_tokens: int = 0
    """Tokens that all steps computed."""
    n_step_room: int = 0
    """Tokens that all steps could have computed: `max_num_batched_tokens` each."""
    n_sealed_files: int = 0
    """Shard files that were sealed: what moves during a long seal."""
    writers: int = 0
    """Writer threads of one engine."""
    sealers: int = 0
    """Sealing threads of one engine."""

    @property
    def wall_s(self) -> float:
        """All of the engine's time: the sum of its main stages."""
        return sum(self.seconds(stage) for stage in MAIN_STAGES)

    @property
    def serving_s(self) -> float:
        """The engine's time since it was ready."""
        return self.wall_s - self.start_s

    @property
    def fullness(self) -> float:
        """Computed tokens as a share of those that the steps had room for."""
        return self.n_step_tokens / self.n_step_room if self.n_step_room else 0.0

    def seconds(self, stage: str) -> float:
        """Seconds of a stage by its name without `_s`."""
        value: float = getattr(self, f"{stage}_s")
        return value

    def __add__(self, other: EngineProfile) -> EngineProfile:
        """Both engines' time together."""
        mine, theirs = asdict(self), asdict(other)
        return EngineProfile(
            **{name: max(mine[name], theirs[name]) if name in _EQUAL else mine[name] + theirs[name] for name in mine}
        )

    def __sub__(self, earlier: EngineProfile) -> EngineProfile:
        """What was added since an earlier profile of the same engine."""
        mine, before = asdict(self), asdict(earlier)
        return EngineProfile(**{name: mine[name] - (0 if name in _EQUAL else before[name]) for name in mine})

    def to_json(self) -> dict[str, Any]:
        """Plain values; seconds to a tenth of a millisecond."""
        return {name: round(value, 4) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> EngineProfile:
        """What `to_json` made, of this or another version."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in known})


class StageClock:
    """Which stage the engine's thread is in, and how long it was in each. `enter` by that thread, `times` by any."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._stage: Stage | None = None
        self._since_s = now()

    def enter(self, stage: Stage | None) -> None:
        """The thread is in `stage` from now on (None: in none)."""
        with self._lock:
            now = self._now()
            if self._stage is not None:
                self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._since_s
            self._stage, self._since_s = stage, now

    def times(self) -> dict[str, float]:
        """Seconds of each stage up to now."""
        with self._lock:
            seconds = dict(self._seconds)
            if self._stage is not None:
                seconds[self._stage] = seconds.get(self._stage, 0.0) + self._now() - self._since_s
            return seconds


def engine_profile(
    stages: dict[str, float], ranks: list[WorkerTimes], *, step_room: int, writers: int
) -> EngineProfile:
    """The profile of an engine.

    Args:
        stages: seconds of its thread (`StageClock.times`).
        ranks: what its ranks counted; the first one's step is the engine's, threads of all of them work beside it.
        step_room: tokens that a step may compute.
        writers: writer threads of a rank.
    """
    first = ranks[0] if ranks else WorkerTimes()
    steps_s = stages.get("forward", 0.0)
    # Where the rank is another process, its snapshot may reach a little beyond the step that waits for it.
    snapshot_s = min(first.snapshot_s, steps_s)
    profile = EngineProfile(
        **{f"{stage}_s": seconds for stage, seconds in stages.items()},
        snapshot_s=snapshot_s,
        device_forward_s=first.device_forward_s,
        device_snapshot_s=first.device_snapshot_s,
        copy_s=sum(rank.copy_s for rank in ranks),
        copy_wait_s=sum(rank.copy_wait_s for rank in ranks),
        write_s=sum(rank.write_s for rank in ranks),
        seal_s=sum(rank.seal_s for rank in ranks),
        n_steps=first.n_steps,
        n_step_tokens=first.n_step_tokens,
        n_step_room=first.n_steps * step_room,
        n_sealed_files=sum(rank.n_sealed_files for rank in ranks),
        writers=writers * len(ranks),
        sealers=SEALERS * len(ranks),
    )
    return replace(profile, forward_s=steps_s - snapshot_s)
