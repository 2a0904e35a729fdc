"""What users import and run: the block client, plan, run, open and the command line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harvest.blocks.attention import attention_pattern
    from harvest.blocks.errors import BlockError, LoopCutError, LoopCutWarning, SourceError
    from harvest.blocks.results import BlockResult
    from harvest.blocks.save import save
    from harvest.blocks.vllm import VLLM
    from harvest.config import load_config
    from harvest.loader import RowLoader
    from harvest.reader import open_run as open
    from harvest.runs import run

# Names that need torch, vLLM or Ray are looked up when they are used: importing harvest imports none of them.
_LAZY = {
    "VLLM": "harvest.blocks.vllm",
    "BlockResult": "harvest.blocks.results",
    "attention_pattern": "harvest.blocks.attention",
    "save": "harvest.blocks.save",
    "load_config": "harvest.config",
    "RowLoader": "harvest.loader",
    "open": "harvest.reader:open_run",
    "run": "harvest.runs",
    "BlockError": "harvest.blocks.errors",
    "LoopCutError": "harvest.blocks.errors",
    "LoopCutWarning": "harvest.blocks.errors",
    "SourceError": "harvest.blocks.errors",
}

__all__ = [
    "VLLM",
    "BlockError",
    "BlockResult",
    "LoopCutError",
    "LoopCutWarning",
    "RowLoader",
    "SourceError",
    "attention_pattern",
    "load_config",
    "open",
    "run",
    "save",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'harvest' has no attribute {name!r}")
    module, _, attribute = module.partition(":")
    return getattr(importlib.import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
