"""What the user sees while a run goes on: a bar on a terminal, lines elsewhere. Fed by the event stream."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

# Rates are taken over this span, so that they follow changes and do not jump.
RATE_WINDOW_S = 20.0
PLAIN_LINE_INTERVAL_S = 10.0


class ProgressView:
    """A listener of the event stream.

    Args:
        console: where to print.
        n_tokens: tokens of the whole run.
        n_committed_tokens: tokens committed before this call.
    """

    def __init__(self, console: Console, *, n_tokens: int, n_committed_tokens: int) -> None:
        self._console = console
        self._total = n_tokens
        self._committed = n_committed_tokens
        self._committed_before = n_committed_tokens
        self._samples: deque[tuple[float, int, int]] = deque()
        self._last_line_s = 0.0
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>5.1f} %"),
            TextColumn("{task.fields[rates]}"),
            TimeElapsedColumn(),
            console=console,
            transient=False,
        )
        self._task = self._progress.add_task(
            "starting engines", total=max(1, n_tokens), completed=n_committed_tokens, rates=""
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def __call__(self, record: dict[str, Any]) -> None:
        """Show an event."""
        match record["event"]:
            case "engine_ready":
                self._progress.update(self._task, description="harvesting")
                self._say(f"{record['engine']} is ready")
            case "commit":
                self._committed += record["n_prompt_tokens"] + record["n_generated_tokens"] - record["n_invokes"]
                self._show(self._committed)
                for location, what in record["suspicious"].items():
                    self._say(f"[yellow]unit {record['unit']}, {escape(location)}:[/] {what}")
            case "progress":
                self._sample(record["n_tokens"], record["written_bytes"])
            case "engine_lost":
                what = "was given up" if record.get("stalled") else "died"
                self._say(f"[yellow]{record['engine']} {what}:[/] {escape(record['reason'])}; its units run again")
            case "unit_failed":
                self._say(f"[yellow]unit {record['unit']} failed:[/] {escape(record['error'])}")
            case "few_engines":
                self._say(
                    f"[yellow]the cluster has room for {record['room']} of {record['count']} engines:[/] the others "
                    "start when it grows; add nodes, or lower engine.count"
                )
            case "drain":
                self._say("stopping: units in flight finish, nothing new begins")

    def _sample(self, n_tokens: int, n_bytes: int) -> None:
        now = time.monotonic()
        if self._samples and n_tokens < self._samples[-1][1]:
            # An engine died, and its counters with it: what was before says nothing of the rate.
            self._samples.clear()
        self._samples.append((now, n_tokens, n_bytes))
        while now - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()
        self._show(max(self._committed, self._committed_before + n_tokens))

    def _show(self, done: int) -> None:
        rates = self._rates(done)
        self._progress.update(self._task, completed=min(done, self._total), rates=rates)
        now = time.monotonic()
        if not self._console.is_terminal and rates and now - self._last_line_s >= PLAIN_LINE_INTERVAL_S:
            self._last_line_s = now
            self._console.print(
                f"{done:,} of {self._total:,} tokens ({100 * done / max(1, self._total):.1f} %) {rates}"
            )

    def _rates(self, done: int) -> str:
        if len(self._samples) < 2:
            return ""
        (begun, tokens_0, bytes_0), (ended, tokens_1, bytes_1) = self._samples[0], self._samples[-1]
        tokens_s = (tokens_1 - tokens_0) / (ended - begun)
        bytes_s = (bytes_1 - bytes_0) / (ended - begun)
        eta = _duration((self._total - done) / tokens_s) if tokens_s > 0 else "?"
        return f"{tokens_s:,.0f} tokens/s  {bytes_s / 1e9:.3f} GB/s  ETA {eta}"

    def _say(self, text: str) -> None:
        (self._progress.console if self._console.is_terminal else self._console).print(text)


def _duration(seconds: float) -> str:
    seconds = max(0, round(seconds))
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"
