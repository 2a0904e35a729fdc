"""Resolve or describe locations without weights, in a process of its own: `python -m actors.worker.locations MODEL`.

Writes JSON to standard output, or to `--result FILE` when another program reads it (vLLM logs to standard output too).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from actors.location_errors import LocationError


def main() -> int:
    """Answer one request; a refused location is an answer, not a crash."""
    parser = argparse.ArgumentParser(prog="python -m actors.worker.locations", description=__doc__)
    parser.add_argument("model", help="local folder or Hugging Face id; only config.json is read")
    parser.add_argument("names", nargs="*", help="locations to resolve; none: describe them all")
    parser.add_argument("--engine-args", default="{}", help="vLLM's engine arguments as JSON")
    parser.add_argument("--tp-size", type=int, default=1, help="resolve layouts for so many tensor-parallel ranks")
    parser.add_argument("--result", type=Path, help="file for the JSON answer")
    asked = parser.parse_args()
    try:
        answer: dict[str, Any] = _answer(asked)
    except LocationError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    text = json.dumps(answer)
    if asked.result is None:
        print(text)
    else:
        asked.result.write_text(text)
    return 1 if "error" in answer else 0


def _answer(asked: argparse.Namespace) -> dict[str, Any]:
    from actors.worker.locations.describe import describe_view
    from actors.worker.locations.resolve import last_layer_needed, resolve_in_view
    from actors.worker.locations.view import view_model
    from actors.worker.tree import build_model_tree, inspect_architectures_in_process

    inspect_architectures_in_process()
    tree = build_model_tree(asked.model, **json.loads(asked.engine_args))
    view = view_model(tree, tp_size=asked.tp_size)
    if asked.names:
        locations = resolve_in_view(view, asked.names)
        return {
            "locations": [location.to_json() for location in locations],
            "last_layer": last_layer_needed(locations),
        }
    return {
        "family": view.family.name,
        "modules": [
            {
                "module": row.path,
                "class": row.class_name,
                "sides": [{"side": side.text, "width": side.width} for side in row.sides],
                "note": row.note,
                "aliases": list(row.aliases),
            }
            for row in describe_view(view)
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
