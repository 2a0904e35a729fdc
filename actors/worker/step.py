"""StepRows: which rows of one forward pass belong to which request.

A pure value, made by a runner adapter from the runner's own order after it has reordered its batch. Nothing else in
Harvest derives row ownership.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class StepRowsError(RuntimeError):
    """The runner's own numbers about a step contradict each other; rows of such a step cannot be attributed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """Row ownership of one step.

    Rows `starts[i]:starts[i + 1]` belong to `request_ids[i]`; the first of them is the token at absolute position
    `first_positions[i]` of that request, the others follow. Rows from `n_rows` on are padding.
    """

    request_ids: tuple[str, ...]
    starts: NDArray[np.int64]
    """[n_requests + 1], starts[0] == 0, ascending."""
    first_positions: NDArray[np.int64]
    """[n_requests], absolute position of each request's first row."""

    @property
    def n_rows(self) -> int:
        """Rows that belong to requests, without padding."""
        return int(self.starts[-1])

    @classmethod
    def checked(
        cls,
        *,
        request_ids: tuple[str, ...],
        starts: NDArray[np.integer],
        first_positions: NDArray[np.integer],
        scheduled: dict[str, int],
    ) -> StepRows:
        """Make a StepRows after comparing the runner's order with what the scheduler asked for.

        Args:
            request_ids: requests in the runner's order.
            starts: [n_requests + 1] row offsets of the runner.
            first_positions: [n_requests] tokens computed before this step.
            scheduled: tokens that the scheduler gave to each request in this step.

        Raises:
            StepRowsError: counts, order or sums do not agree.
        """
        n_requests = len(request_ids)
        if len(starts) != n_requests + 1 or len(first_positions) != n_requests or starts[0] != 0:
            raise StepRowsError(
                f"the runner reports {n_requests} requests, {len(starts)} row offsets and {len(first_positions)} "
                "first positions"
            )
        counts = np.diff(starts)
        expected = np.fromiter((scheduled.get(name, -1) for name in request_ids), np.int64, n_requests)
        if len(scheduled) != n_requests or not np.array_equal(counts, expected):
            raise StepRowsError(
                f"the runner's rows per request {counts.tolist()} are not what was scheduled {expected.tolist()} "
                f"for {len(scheduled)} requests"
            )
        if (np.asarray(first_positions) < 0).any():
            raise StepRowsError(f"negative first positions: {np.asarray(first_positions).tolist()}")
        return cls(
            request_ids=request_ids,
            starts=np.asarray(starts, np.int64).copy(),
            first_positions=np.asarray(first_positions, np.int64).copy(),
        )
