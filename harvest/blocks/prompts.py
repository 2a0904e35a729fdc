"""The forms in which an invoke takes its one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_VLLM_KEYS = ("prompt_token_ids", "prompt", "prompt_embeds")


def to_vllm_prompt(prompt: Any) -> Any:
    """What vLLM takes for `prompt`: a string or a dict with token ids.

    Args:
        prompt: a string; token ids as a list, tuple, tensor or array; a tokenizer's output (with an attention mask,
            the tokens that it selects); or one of vLLM's own prompt dicts.

    Raises:
        ValueError: no tokens, or more than one prompt.
        TypeError: none of these forms.
    """
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        if "input_ids" in prompt:
            ids = _one_row(prompt["input_ids"])
            mask = prompt.get("attention_mask")
            if mask is not None:
                kept = _one_row(mask)
                if len(kept) != len(ids):
                    raise ValueError(f"the attention mask has {len(kept)} entries for {len(ids)} token ids")
                ids = [token for token, keep in zip(ids, kept, strict=True) if keep]
            return _ids_prompt(ids)
        if any(key in prompt for key in _VLLM_KEYS):
            return dict(prompt)
        raise TypeError(f"a prompt dict needs input_ids or prompt_token_ids; this one has {sorted(map(str, prompt))}")
    if isinstance(prompt, (list, tuple)) or hasattr(prompt, "tolist"):
        return _ids_prompt(_one_row(prompt))
    raise TypeError(f"a prompt is a string, a list of token ids or a tokenizer's output, not a {type(prompt).__name__}")


def _ids_prompt(ids: list[int]) -> dict[str, list[int]]:
    if not ids:
        raise ValueError("the prompt has no tokens")
    return {"prompt_token_ids": ids}


def _one_row(ids: Any) -> list[int]:
    """Token ids of one prompt, from `[tokens]` or `[1, tokens]`."""
    values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if values and all(isinstance(item, (list, tuple)) or hasattr(item, "tolist") for item in values):
        if len(values) > 1:
            raise ValueError(_SEVERAL.format(n=len(values)))
        return _one_row(values[0])
    if any(isinstance(item, str) for item in values):
        raise ValueError(_SEVERAL.format(n=len(values)))
    if not all(isinstance(item, int) for item in values):
        raise TypeError("token ids must be integers")
    return values


_SEVERAL = (
    "an invoke takes one prompt and got {n}; open one invoke for each: "
    "`with model.trace() as tracer:` and in it `with tracer.invoke(prompt):`"
)
