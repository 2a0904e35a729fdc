"""What planning must know of a model: its length and vocabulary (`config.json`), its `generation_config.json`.

A local folder's file is read as JSON, since the transformers classes would drag torch into the driver (seconds). A
Hugging Face id goes through transformers, which knows where hub files lie.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harvest.errors import ConfigError

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
# Long enough for most prompts, short enough that a model of unknown length is not asked for too much.
DEFAULT_MAX_LENGTH = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Limits of a model."""

    max_length: int
    """Longest sequence in tokens."""
    n_vocabulary: int | None
    """Token ids are below this number; None where the config does not say."""
    commit: str | None
    """Of a Hugging Face id: what its revision stands for now. None for a local folder."""


def read_model_facts(model: str, *, trust_remote_code: bool, revision: str | None) -> ModelFacts:
    """Limits of a local folder or a Hugging Face id.

    Raises:
        ConfigError: there is no readable config.
    """
    path = Path(model) / "config.json"
    commit = None
    try:
        if path.is_file():
            config = json.loads(path.read_text(encoding="utf-8"))
        else:
            from transformers import PretrainedConfig
            from transformers.utils.hub import cached_file, extract_commit_hash

            config, _ = PretrainedConfig.get_config_dict(model, revision=revision, trust_remote_code=trust_remote_code)
            # The file is in the hub's cache now, in a folder that is named after the commit.
            commit = extract_commit_hash(cached_file(model, "config.json", revision=revision), None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the config of model {model} cannot be read: {error}") from error
    # Multimodal models keep the language model's numbers in a section of their own.
    texts: list[Mapping[str, Any]] = [config, *(config[key] for key in ("text_config", "llm_config") if key in config)]
    return ModelFacts(
        max_length=_first_int(texts, _LENGTH_KEYS) or DEFAULT_MAX_LENGTH,
        n_vocabulary=_first_int(texts, ("vocab_size",)),
        commit=commit,
    )


def planned_revision(run: dict[str, Any]) -> str | None:
    """Of the model in `run.json`: the commit that a run is pinned to, or what the configuration asks for."""
    revision: str | None = run.get("revision", run["content"]["model"]["revision"])
    return revision


# What vLLM's server would take from generation_config.json; a harvest takes these from its own configuration only.
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """What `generation_config.json` asks for."""

    end_token_ids: tuple[int, ...]
    """An answer ends at these, unless `ignore_eos` is set: many chat models name the end of a turn only here."""
    unused: dict[str, Any]
    """Sampling settings, which a harvest does not use."""


def read_generation_defaults(model: str, *, revision: str | None) -> GenerationDefaults:
    """What the model's `generation_config.json` asks for; nothing where there is none."""
    path = Path(model) / "generation_config.json"
    try:
        if Path(model).is_dir():
            content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        else:
            from transformers import PretrainedConfig

            content, _ = PretrainedConfig.get_config_dict(
                model, revision=revision, _configuration_file="generation_config.json"
            )
    except (OSError, ValueError):
        content = {}
    ends = content.get("eos_token_id")
    return GenerationDefaults(
        end_token_ids=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
        unused={key: content[key] for key in _SAMPLING_KEYS if content.get(key) is not None},
    )


def _first_int(texts: list[Mapping[str, Any]], keys: tuple[str, ...]) -> int | None:
    for text in reversed(texts):
        for key in keys:
            value = text.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return None
