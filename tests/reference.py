"""What transformers computes of a tiny model: the independent reference for rows and for greedy answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Reference:
    """A model in float32, one sequence at a time, nothing batched and nothing cached."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def rows(self, token_ids: Sequence[int]) -> dict[str, np.ndarray[Any, Any]]:
        """`residual.N` (but for the last layer's), `final_norm` and `logits` of one sequence, [tokens, width] each."""
        with torch.inference_mode():
            output = self._model(torch.tensor([list(token_ids)]), use_cache=False, output_hidden_states=True)
        *streams, final = (state[0].numpy() for state in output.hidden_states)
        named = {f"residual.{layer}": stream for layer, stream in enumerate(streams[1:])}
        return {**named, "final_norm": final, "logits": output.logits[0].numpy()}

    def answer(
        self, prompt: Sequence[int], *, max_tokens: int, min_tokens: int = 0, ends: Collection[int] = ()
    ) -> list[int]:
        """The greedy answer; as in vLLM, no end token is chosen before `min_tokens`, and an end token is part of it."""
        generated: list[int] = []
        while len(generated) < max_tokens:
            logits = self.rows([*prompt, *generated])["logits"][-1].copy()
            if len(generated) < min_tokens:
                logits[list(ends)] = -np.inf
            generated.append(int(logits.argmax()))
            if generated[-1] in ends:
                break
        return generated


def relative_error(rows: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]) -> float:
    """Largest relative error of a row."""
    difference = np.linalg.norm(rows.astype(np.float64) - reference, axis=1)
    return float((difference / np.linalg.norm(reference, axis=1)).max())
