"""StallWatch: which engines hold units and make no progress. Pure: time is an argument, counters are what engines told.

Progress is a counter that has moved, or a lease that was given or has ended. The driver looks again and again; silence
is counted from look to look.

Invariants:
- an engine without leases is never stalled, so neither is one that starts;
- time without progress is never counted too long: what is found at a look counts as of that look;
- one look counts `1 / LOOKS` of the limit at most, so that a pause of the driver's own (a long commit, a stopped
  process), in which it hears nothing of anybody, is no stall of an engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from actors.profile import MAIN_STAGES, EngineProfile
from actors.protocol import EngineStats, Lease

LOOKS = 10
_STAGE_WORDS = {
    "plan": "reading the plan does not end",
    "feed": "adding requests does not end",
    "forward": "a step does not end: a hung kernel or collective",
    "snapshot": "a step does not end: a hung kernel or collective",
    "settle": "a rank does not answer",
    "gated": "rows fill the ring, and the disk takes none of them",
    "sealing": "a unit is being sealed, and the disk takes none of its files",
    "idle": "it does not take its units: a rank does not answer",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """An engine that is to be given up."""

    engine: str
    limit_s: float
    quiet_s: float
    """Time without progress."""
    unanswered_s: float
    """The last part of it, in which the engine did not answer."""
    stage: str | None
    """Stage in which its thread was for most of the time without progress; None where it told too little."""

    @property
    def reason(self) -> str:
        """For the user: what was seen, and what it may come from."""
        said = f"no progress for {self.quiet_s:.0f} s (limits.stall_s = {self.limit_s:g})"
        if self.unanswered_s >= self.quiet_s / 2:
            return (
                f"{said}, no answer for {self.unanswered_s:.0f} s: its process is stopped or stuck, or its node cut off"
            )
        if self.stage is None:
            return said
        return f"{said}, its thread was in the stage {self.stage}: {_STAGE_WORDS[self.stage]}"


@dataclass(kw_only=True, slots=True)
class _Watched:
    leases: frozenset[Lease] = frozenset()
    counters: tuple[int, ...] = ()
    then: EngineProfile | None = None
    """As told when progress was last seen."""
    now: EngineProfile | None = None
    """As told last."""
    moved: bool = True
    """Since the last look."""
    answered: bool = True
    quiet_s: float = 0.0
    unanswered_s: float = 0.0


class StallWatch:
    """See the module's docstring.

    Args:
        stall_s: time without progress after which an engine is given up; None: never.
    """

    def __init__(self, stall_s: float | None) -> None:
        self._stall_s = stall_s
        self._engines: dict[str, _Watched] = {}
        self._looked_s: float | None = None

    def hear(self, engine: str, stats: EngineStats) -> None:
        """An engine has answered."""
        watched = self._engines.setdefault(engine, _Watched())
        watched.answered = True
        watched.now = stats.profile
        counters = _counters(stats)
        if counters != watched.counters:
            watched.counters, watched.then, watched.moved = counters, stats.profile, True

    def look(self, now_s: float, leases: Mapping[str, Collection[Lease]]) -> list[Stall]:
        """The engines that have stalled by now; each is told once and then forgotten.

        Args:
            now_s: of a clock that only goes forward.
            leases: live ones, of each engine that has any.
        """
        if self._stall_s is None:
            return []
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, self._stall_s / LOOKS)
        self._looked_s = now_s
        for engine in self._engines.keys() - leases.keys():
            del self._engines[engine]  # idle, or gone
        return [
            stall
            for engine, held in leases.items()
            if (stall := self._look_at(engine, frozenset(held), passed_s, self._stall_s)) is not None
        ]

    def _look_at(self, engine: str, leases: frozenset[Lease], passed_s: float, stall_s: float) -> Stall | None:
        watched = self._engines.setdefault(engine, _Watched())
        if leases != watched.leases:
            watched.leases, watched.then = leases, watched.now
            watched.moved = watched.answered = True
        watched.quiet_s = 0.0 if watched.moved else watched.quiet_s + passed_s
        watched.unanswered_s = 0.0 if watched.answered else watched.unanswered_s + passed_s
        watched.moved = watched.answered = False
        if watched.quiet_s < stall_s:
            return None
        del self._engines[engine]
        return Stall(
            engine=engine,
            limit_s=stall_s,
            quiet_s=watched.quiet_s,
            unanswered_s=watched.unanswered_s,
            stage=_main_stage(watched.then, watched.now),
        )


def _counters(stats: EngineStats) -> tuple[int, ...]:
    """All that only work can move. Steps and tokens of the profile count those without a wanted row too."""
    profile = stats.profile
    return (
        stats.n_tokens,
        stats.n_rows,
        stats.written_bytes,
        stats.n_steps,
        stats.n_recomputed,
        profile.n_steps,
        profile.n_step_tokens,
        profile.n_sealed_files,
    )


def _main_stage(then: EngineProfile | None, now: EngineProfile | None) -> str | None:
    if then is None or now is None:
        return None
    spent = now - then
    stage = max((each for each in MAIN_STAGES if each in _STAGE_WORDS), key=spent.seconds)
    return stage if spent.seconds(stage) > 0 else None
