"""docs/blocks.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs" / "blocks.md"


def test_every_test_that_the_table_names_exists() -> None:
    text = DOCS.read_text()
    table = text[text.index("## What is supported") : text.index("## What is not")]
    n_named = 0
    for line in table.splitlines():
        file = ""
        for word in re.findall(r"`(test_\w+(?:::test_\w+)?)`", line):
            module, _, name = word.rpartition("::")
            if module:
                file = module
            elif (found := list(TESTS.glob(f"*/{word}.py"))) and found:
                n_named += 1
                continue
            else:
                name = word
            sources = [path.read_text() for path in TESTS.glob(f"*/{file}.py")]
            assert any(f"def {name}(" in source for source in sources), f"{file}::{name}"
            n_named += 1
    assert n_named > 60
