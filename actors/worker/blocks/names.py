"""Names that the caller's side puts into a block's code and the engine's side gives a meaning."""

SAVE_NAME = "__harvest_save__"
"""Called as SAVE(value) for `value.save()`; returns the value."""

NAMED_NAME = "__harvest_named__"
"""Called as NAMED(name, value) after an assignment that may have saved `value`."""
