"""Keyword arguments of `trace`, `invoke`, `generate` and `run` that go to vLLM's SamplingParams."""

from __future__ import annotations

import difflib
import functools
from typing import Any

_RENAMED = {"max_new_tokens": "max_tokens"}
_REFUSED = {
    "output_kind": "results come back once, when a request has finished",
    "skip_clone": "it is vLLM's own",
}


@functools.cache
def sampling_names() -> frozenset[str]:
    """The arguments that vLLM's SamplingParams takes."""
    from actors.worker.blocks.settings import sampling_parameter_names

    return sampling_parameter_names() - set(_REFUSED)


def checked_sampling(arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments` under vLLM's names.

    Raises:
        TypeError: an argument that SamplingParams does not have; the message names near ones.
    """
    checked: dict[str, Any] = {}
    for given, value in arguments.items():
        name = _RENAMED.get(given, given)
        if name in _REFUSED:
            raise TypeError(f"{given} cannot be set: {_REFUSED[name]}")
        if name not in sampling_names():
            near = difflib.get_close_matches(name, [*sampling_names(), *_RENAMED], n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise TypeError(f"{given!r} is not a sampling argument{hint}")
        if name in checked:
            raise TypeError(f"{name} is given twice")
        checked[name] = value
    return checked
