"""Results of sittings as a Markdown table: medians, and ratios within the sitting's repeats."""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

Rows = dict[tuple[str, str], dict[int, dict[str, Any]]]
# Workload of ours -> workload of plain vLLM that it is compared with.
_BASE = {"prefill-disk": "prefill", "few-disk": "prefill", "short-disk": "short", "decode-disk": "decode"}


def read(paths: list[str]) -> Rows:
    """(system, workload) -> repeat -> result, without warm-ups."""
    rows: Rows = defaultdict(dict)
    for path in paths:
        for line in Path(path).read_text().splitlines():
            row = json.loads(line)
            if row.get("repeat", 0) > 0 and "error" not in row:
                rows[row["system"], row["workload"]][row["repeat"]] = row
    return rows


def ratio(rows: Rows, first: tuple[str, str], second: tuple[str, str]) -> list[float]:
    """Speed of the first over that of the second, repeat by repeat."""
    both = sorted(rows[first].keys() & rows[second].keys())
    return [rows[first][repeat]["tok_s"] / rows[second][repeat]["tok_s"] for repeat in both]


def table(rows: Rows) -> str:
    """All cases in the order of the first result."""
    lines = [
        "| system | workload | tok/s | ratio to plain (min–max) | GB/s | device peak GB | host peak GB | repeats |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (system, workload), results in list(rows.items()):
        values = list(results.values())
        stored = [row["stored_bytes"] / row["seconds"] / 1e9 for row in values if row.get("stored_bytes")]
        speed = f"{statistics.median(row['tok_s'] for row in values):,.0f}" if "tok_s" in values[0] else ""
        ratios = ratio(rows, (system, workload), ("plain", _BASE.get(workload, workload))) if speed else []
        shown = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f})" if ratios else ""
        device = f"{max(row['device_peak_bytes'] for row in values) / 1e9:.1f}" if speed else ""
        host = f"{max(row['host_peak_bytes'] for row in values) / 1e9:.1f}" if speed else ""
        rate = f"{statistics.median(stored):.2f}" if stored else ""
        lines.append(f"| {system} | {workload} | {speed} | {shown} | {rate} | {device} | {host} | {len(values)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(read(sys.argv[1:])))
