"""docs/locations.md says what the code does."""

from __future__ import annotations

from actors.worker.locations.families import ALIASES
from actors.worker.tree import inspect_architectures_in_process
from tests.actors.locations.family_table import DOCUMENT, family_tables, rewrite


def test_the_documents_tables_are_the_models_own() -> None:
    inspect_architectures_in_process()
    text = DOCUMENT.read_text()
    assert rewrite(text, family_tables()) == text, "run: python -m tests.actors.locations.family_table"


def test_every_alias_is_explained() -> None:
    text = DOCUMENT.read_text()
    assert [alias for alias in ALIASES if f"`{alias}`" not in text and f"`{alias}.N`" not in text] == []
