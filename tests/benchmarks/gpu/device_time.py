"""How busy the device was while something ran, by kernel times from torch's profiler."""

from __future__ import annotations

from collections import Counter
from typing import Any


class DeviceTime:
    """A context: records the device's activity inside."""

    def __init__(self) -> None:
        self._profile: Any = None

    def __enter__(self) -> DeviceTime:
        import torch

        if torch.cuda.is_available():
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._profile is not None:
            self._profile.__exit__(*error)

    def summary(self) -> dict[str, Any]:
        """Shares of the time from the first kernel to the last: kernels, copies to the host, and where it idled."""
        if self._profile is None:
            return {}
        kernels: list[tuple[int, int, str]] = []
        copies: list[tuple[int, int, str]] = []
        for event in self._profile.profiler.kineto_results.events():
            if "cuda" not in str(event.device_type()).lower() or event.duration_ns() <= 0:
                continue
            span = (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
            (copies if "Memcpy" in event.name() or "Memset" in event.name() else kernels).append(span)
        if not kernels:
            return {}
        begin, end = min(kernels)[0], max(kernel[1] for kernel in kernels)
        busy, gaps = _cover(kernels)
        by_kernel: Counter[str] = Counter()
        for start, stop, name in kernels:
            by_kernel[name[:80]] += stop - start
        by_gap: Counter[str] = Counter()
        for length, after, before in gaps:
            by_gap[f"{after[:50]} -> {before[:50]}"] += length
        total = end - begin
        return {
            "total_s": total / 1e9,
            "kernel_share": busy / total,
            "idle_share": 1 - busy / total,
            "copy_share": _cover(copies)[0] / total if copies else 0.0,
            "longest_gaps_ms": [round(gap[0] / 1e6, 3) for gap in sorted(gaps, reverse=True)[:10]],
            "n_gaps_over_100us": sum(gap[0] > 100_000 for gap in gaps),
            "gaps_between": {name: round(ns / total, 5) for name, ns in by_gap.most_common(8)},
            "kernels": {name: round(ns / total, 4) for name, ns in by_kernel.most_common(12)},
        }


def _cover(spans: list[tuple[int, int, str]]) -> tuple[int, list[tuple[int, str, str]]]:
    """Length of the union, and the gaps: (length, name before, name after)."""
    covered = 0
    gaps: list[tuple[int, str, str]] = []
    end, last = 0, ""
    for start, stop, name in sorted(spans):
        if end and start > end:
            gaps.append((start - end, last, name))
        if stop > end:
            covered += stop - max(start, end)
            end, last = stop, name
    return covered, gaps
