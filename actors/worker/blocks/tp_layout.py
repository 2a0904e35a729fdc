"""How a location's tensors are spread over the ranks of a tensor-parallel engine.

Blocks see every value full-width and in TP=1 order, on all ranks alike; what they write goes back as each rank's own
part.
"""

from __future__ import annotations

from typing import Any


class SiteLayout:
    """The layout of one site: how to make its value whole, and how to cut it up again."""

    def gather(self, value: Any) -> Any:
        return value

    def scatter(self, full: Any, value: Any, *, in_place: bool) -> Any:
        return full


def layout_of(sites: Any, name: str, tp_size: int) -> SiteLayout:
    return SiteLayout()
