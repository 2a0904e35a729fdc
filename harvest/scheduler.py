"""Scheduler: which unit goes to which engine, and what becomes of it. A pure state machine: no Ray, torch, zarr, clock.

A unit is pending → leased → committed; a lease that fails or whose engine dies makes it pending again, at the front.

Invariants:
- a unit has at most one live lease;
- a committed unit is never leased again;
- each lease has its own attempt number;
- a unit that fails `max_attempts` times, or `max_engine_losses` engine deaths without a commit in between, stop the
  run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from actors.protocol import Lease


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Why the run cannot go on."""

    reason: str


class Scheduler:
    """See the module's docstring.

    Args:
        pending: units to do, in order.
        number_attempt: the number of a unit's next attempt, unique over restarts of the driver.
        max_attempts: failed attempts of one unit that stop the run.
        max_engine_losses: engine deaths without a commit in between that stop the run.
        units_in_flight: leases of one engine at a time.
    """

    def __init__(
        self,
        pending: Iterable[int],
        *,
        number_attempt: Callable[[int], int],
        max_attempts: int,
        max_engine_losses: int,
        units_in_flight: int,
    ) -> None:
        self._pending: deque[int] = deque(pending)
        self._number_attempt = number_attempt
        self._max_attempts = max_attempts
        self._max_engine_losses = max_engine_losses
        self._units_in_flight = units_in_flight
        self._leased: dict[Lease, str] = {}
        self._failures: dict[int, int] = {}
        self._engine_losses = 0
        self._draining = False
        self.n_committed = 0
        self.stop: Stop | None = None

    @property
    def finished(self) -> bool:
        """Nothing is pending or leased."""
        return not self._pending and not self._leased

    @property
    def idle(self) -> bool:
        """Nothing is leased, and nothing will be."""
        return not self._leased and (not self._pending or self._draining or self.stop is not None)

    @property
    def n_pending(self) -> int:
        """Units that wait for a lease."""
        return len(self._pending)

    @property
    def leases(self) -> dict[str, frozenset[Lease]]:
        """The live leases of each engine that has any."""
        held: dict[str, set[Lease]] = {}
        for lease, engine in self._leased.items():
            held.setdefault(engine, set()).add(lease)
        return {engine: frozenset(leases) for engine, leases in held.items()}

    def drain(self) -> None:
        """Lease nothing more."""
        self._draining = True

    def lease(self, engine: str) -> Lease | None:
        """A unit for an engine, or None when it has enough or none is left."""
        if self._draining or self.stop is not None or not self._pending:
            return None
        if sum(holder == engine for holder in self._leased.values()) >= self._units_in_flight:
            return None
        unit = self._pending.popleft()
        lease = Lease(unit=unit, attempt=self._number_attempt(unit))
        self._leased[lease] = engine
        return lease

    def is_live(self, lease: Lease) -> bool:
        """False for a lease that was given up: its receipt must be dropped."""
        return lease in self._leased

    def commit(self, lease: Lease) -> None:
        """The unit of a live lease is committed."""
        del self._leased[lease]
        self.n_committed += 1
        self._engine_losses = 0

    def fail(self, lease: Lease, reason: str) -> None:
        """An attempt failed while its engine lives."""
        if self._leased.pop(lease, None) is None:
            return
        self._retry(lease.unit, reason)

    def lose_engine(self, engine: str, reason: str) -> list[Lease]:
        """An engine died: its leases are void, their units pending again."""
        lost = [lease for lease, holder in self._leased.items() if holder == engine]
        for lease in reversed(lost):
            del self._leased[lease]
            self._retry(lease.unit, f"its engine died: {reason}")
        self._engine_losses += 1
        if self._engine_losses > self._max_engine_losses and self.stop is None:
            self.stop = Stop(
                reason=f"{self._engine_losses} engines died without a unit committed in between; the last: {reason}"
            )
        return lost

    def _retry(self, unit: int, reason: str) -> None:
        self._pending.appendleft(unit)
        self._failures[unit] = self._failures.get(unit, 0) + 1
        if self._failures[unit] >= self._max_attempts and self.stop is None:
            self.stop = Stop(reason=f"unit {unit} failed {self._failures[unit]} times; the last: {reason}")
