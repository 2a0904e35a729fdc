"""The tables of docs/locations.md, made from the models themselves: `python -m tests.actors.locations.family_table`."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from actors.worker.locations import LocationError, ModelView, resolve_in_view, view_model
from actors.worker.locations.families import ALIASES, ONCE
from actors.worker.tree import build_model_tree, inspect_architectures_in_process
from tests.actors.locations.tiny import FAMILIES, tiny_config

DOCUMENT = Path(__file__).parents[3] / "docs" / "locations.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
# A fused kernel that the CPU build offers on one rank only.
_ONE_RANK_ONLY = {"gpt_oss"}


def family_tables() -> str:
    """One table for each set of families that share it."""
    titles: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            path = Path(folder) / family
            tiny_config(family).save_pretrained(path)
            tree = build_model_tree(str(path), max_model_len=64)
            one = view_model(tree, tp_size=1)
            two = None if family in _ONE_RANK_ONLY else view_model(tree, tp_size=2)
            titles.setdefault(_table(one, two), []).append(f"{one.family.name} (`{one.architecture}`)")
    return "\n\n".join(f"### {', '.join(names)}\n\n{table}" for table, names in titles.items())


def _table(one: ModelView, two: ModelView | None) -> str:
    lines = ["| alias | read at | over ranks |", "|---|---|---|"]
    lacking: list[str] = []
    for alias in ALIASES:
        # The last layer speaks for all but where a family mixes kinds: then the first that has it.
        names = [alias] if alias in ONCE else [f"{alias}.{layer}" for layer in range(one.n_layers - 1, -1, -1)]
        for name in names:
            try:
                (location,) = resolve_in_view(one, [name])
            except LocationError as error:
                reason = str(error).partition(": ")[2]
                continue
            label = "not on CPU" if two is None else resolve_in_view(two, [name])[0].layout.label
            path = location.path.replace(f"{location.module}.", "", 1).replace(f" + {location.module}.", " + ")
            module = re.sub(r"\.\d+(?=\.|$)", ".N" if alias != "residual_pre" else ".N-1", location.module)
            shown = alias if alias in ONCE else f"{alias}.N"
            lines.append(f"| `{shown}` | `{module}` `{path}` | {label} |")
            break
        else:
            lacking.append(f"`{alias}`: {reason}.")
    return "\n".join(
        [
            *lines,
            "",
            f"Not there: {' '.join(lacking)}"
            if lacking
            else "All are there, `neurons` and `router` in the layers that have them.",
        ]
    )


def rewrite(text: str, tables: str) -> str:
    """The document with its tables replaced."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables}\n\n{END}{tail}"


if __name__ == "__main__":
    inspect_architectures_in_process()
    DOCUMENT.write_text(rewrite(DOCUMENT.read_text(), family_tables()))
