"""The run's configuration: TOML files, dotted overrides, frozen models.

Two kinds of sections:

- *content* (`model`, `dataset`, `tokenization`, `capture`, `store`, `seed`) decides what is stored. Its hash is part
  of the plan; a run folder is resumed only under the same content.
- *speed* (`engine`, `limits`) decides how fast. It may change between a run and its resumption, but for those
  arguments of `engine.vllm` that change values (`quantization`, ...).

Unknown keys are refused with the nearest known one. Nothing here imports vllm, torch or ray: parsing takes
milliseconds.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from actors.selection import Selection
from harvest.errors import ConfigError

# Arguments of `engine.vllm` that change what a model computes, so that they are content; the others change its speed.
_VALUE_ARGUMENTS = frozenset(
    {
        "quantization",
        "quantization_config",
        "hf_overrides",
        "hf_config_path",
        "kv_cache_dtype",
        "lora_dtype",
        "model_impl",
    }
)


class Section(BaseModel):
    """Base of all sections: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(Section):
    """Which model, and the arguments that change its values."""

    name: str
    """Hugging Face id, local folder, or a name from `harvest models list`."""
    revision: str | None = None
    """Commit or branch of a Hugging Face id."""
    tokenizer: str | None = None
    """Tokenizer id or folder where it is not the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype. `auto` means float32 on CPU, the checkpoint's own dtype on GPU."""
    max_length: int | None = Field(default=None, gt=0)
    """Longest sequence in tokens, prompt and generated tokens together. Default: the model's own limit."""
    trust_remote_code: bool = False
    """Run code that ships with a Hugging Face repository."""
    lora: str | None = None
    """Folder or Hugging Face id of a LoRA adapter (PEFT's format), applied to every prompt of the run."""


class DatasetConfig(Section):
    """Where the prompts are."""

    path: str | tuple[str, ...]
    """File, folder, glob, or a list of these: parquet, JSON lines, plain text, Arrow files, or a folder written by
    Hugging Face `save_to_disk`; also gzip, bzip2, zstd, xz or lz4 compressed."""
    format: Literal["auto", "parquet", "jsonl", "text", "arrow"] = "auto"
    """File format; `auto` goes by the file name. Plain text has one prompt a line."""
    text_column: str = "text"
    """Column with the prompt's text."""
    tokens_column: str | None = None
    """Column with token ids, used as they are instead of text."""
    messages_column: str | None = None
    """Column with chat messages (`role`, `content`), rendered by the tokenizer's chat template instead of text."""
    id_column: str | None = None
    """Column with the user's own ids (unique; strings or integers). They are stored beside the row number."""
    limit: int | None = Field(default=None, gt=0)
    """Read only the first so many records."""

    @model_validator(mode="after")
    def _one_source(self) -> DatasetConfig:
        if self.tokens_column and self.messages_column:
            raise ValueError("set tokens_column or messages_column, not both")
        return self


class TokenizationConfig(Section):
    """How text becomes token ids."""

    add_special_tokens: bool = True
    """Let the tokenizer add its own special tokens (BOS); never doubled. Off for chat messages, whose template does
    it."""
    add_generation_prompt: bool = False
    """End chat messages with the header of the assistant's turn."""
    overlong: Literal["refuse", "truncate", "split", "skip"] = "refuse"
    """A prompt longer than the model takes: refuse the run, cut its end, split it into several invokes, or list it as
    skipped."""
    bad_records: Literal["refuse", "skip"] = "skip"
    """An empty, null, non-text or undecodable record: refuse the run, or list it as skipped with its reason."""
    processes: int = Field(default=0, ge=0)
    """Tokenising processes; 0 means one for each CPU core, or a single one for a small dataset; 1 means: in this
    process, without another."""


class RowsConfig(Section):
    """Which of an invoke's tokens get a row. One selection serves all locations of a run.

    `skip_first`, `skip_special_tokens` and `roles` come first; `select` then picks from what they leave of the source.
    """

    select: Literal["all", "last", "slice", "every", "sample"] = "all"
    """All tokens, the last one, a slice, every k-th, or a seeded sample."""
    source: Literal["prompt", "generated", "both"] = "prompt"
    """Tokens of the prompt, generated tokens, or both."""
    start: int | None = None
    """`slice`: first position, negative from the end, as in Python. Generated tokens have no known end: no
    negatives."""
    stop: int | None = None
    """`slice`: position after the last, negative from the end, as in Python."""
    every: int = Field(default=1, gt=0)
    """`every`: take tokens 0, k, 2k, ..."""
    sample: int | None = Field(default=None, gt=0)
    """`sample`: so many tokens of each invoke (all, if it has fewer), in order."""
    skip_special_tokens: bool = False
    """Give no row to the prompt's special tokens (BOS, EOS, chat markers); generated ones keep theirs."""
    skip_first: int = Field(default=0, ge=0)
    """Give no row to the first so many tokens of each invoke (attention sinks)."""
    roles: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Chat messages only: give rows to prompt tokens inside the content of messages of these roles alone, as
    `["assistant"]`. The word `template` stands for the chat template's own tokens: headers, separators, the generation
    prompt."""
    reduce: Literal["mean", "max"] | None = None
    """Make one row of an invoke's selected tokens: their mean, or the largest value in each column. Prompt tokens
    only. Without it each token has its row."""

    def selection(self, generation: GenerationConfig, *, seed: int, special_ids: Iterable[int] = ()) -> Selection:
        """The rule for one run.

        Args:
            generation: whether every answer has the same length decides what may be selected.
            seed: chooses samples.
            special_ids: the tokenizer's special token ids; used if `skip_special_tokens`.

        Raises:
            SelectionError: a setting that belongs to another `select`, or rows placed by where an answer ends.
        """
        return Selection(
            select=self.select,
            source=self.source,
            start=self.start,
            stop=self.stop,
            every=self.every,
            sample=self.sample,
            skip_first=self.skip_first,
            special_ids=tuple(special_ids) if self.skip_special_tokens else (),
            roles=self.roles or (),
            seed=seed,
            exact_length=generation.exact_length,
            reduce=self.reduce,
        )


class GenerationConfig(Section):
    """Sampling; used when `max_tokens` > 1 or generated rows are selected. vLLM's own names and meaning."""

    max_tokens: int = Field(default=1, gt=0)
    """Tokens to generate for each prompt. 1 means: prompts only."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy. Sampling settings in a model's generation_config.json are ignored."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    min_tokens: int = Field(default=0, ge=0)
    """No end before so many tokens."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    seed: int | None = None
    """Seed of the sampler; each invoke derives its own."""
    logprobs: bool = False
    """Store `tokens/logprob`: the log-probability that the model gave each generated token when it was sampled, from
    its logits as they are (before temperature, top_p, top_k and min_tokens)."""

    @property
    def exact_length(self) -> bool:
        """Every answer has exactly `max_tokens` tokens: nothing can end it sooner."""
        return self.min_tokens >= self.max_tokens or (self.ignore_eos and not self.stop)


class CaptureConfig(Section):
    """What is taken out of the model."""

    locations: tuple[str, ...] = Field(min_length=1)
    """Aliases (`residual.10`), module paths (`model.layers.3.mlp.output`), patterns and ranges;
    `harvest locations MODEL` lists them."""
    rows: RowsConfig = RowsConfig()
    generation: GenerationConfig = GenerationConfig()

    @model_validator(mode="after")
    def _generation_fits(self) -> CaptureConfig:
        if self.rows.source != "prompt" and self.generation.max_tokens < 2:
            raise ValueError(
                f'rows.source = "{self.rows.source}" needs generation.max_tokens >= 2: the last generated token is '
                "never fed back to the model, so one token alone has no generated row"
            )
        if self.generation.logprobs and self.rows.source == "prompt":
            raise ValueError(
                'generation.logprobs labels rows of generated tokens, of which rows.source = "prompt" has none: use '
                'rows.source = "generated" or "both"'
            )
        self.rows.selection(self.generation, seed=0)
        return self


class StoreConfig(Section):
    """The run folder and the form of its arrays."""

    path: str
    """The run folder. The Zarr group is `data.zarr` inside it."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Stored dtype. float16 refuses values over 65,504."""
    shard_bytes: int = Field(default=256 * 1024**2, gt=0)
    """Target size of one shard file of the widest location."""
    unit_tokens: int = Field(default=1_000_000, gt=0)
    """At most about so many prompt tokens in a unit, the grain of retry, commit and resume."""
    rows_per_shard: int | None = Field(default=None, gt=0)
    """Rows of a shard, a power of two; overrides `shard_bytes`."""
    shards_per_unit: int | None = Field(default=None, gt=0)
    """Shards of a unit; overrides `unit_tokens`."""
    compression: Literal["none", "zstd"] = "none"
    """zstd is level 1: about 1.25 times smaller at 0.4 GB/s a core."""

    @field_validator("rows_per_shard")
    @classmethod
    def _power_of_two(cls, value: int | None) -> int | None:
        if value is not None and value & (value - 1):
            raise ValueError(f"rows_per_shard must be a power of two, not {value}")
        return value


class EngineConfig(Section):
    """The vLLM engines."""

    count: int = Field(default=1, gt=0)
    """Engines, each a Ray actor."""
    tensor_parallel_size: int = Field(default=1, gt=0)
    """GPUs of one engine."""
    cpus: float = Field(default=1, ge=0)
    """CPUs that Ray reserves for one engine."""
    units_in_flight: int = Field(default=2, gt=0)
    """Units leased to one engine at a time, so that it computes while another unit is sealed."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further vLLM engine arguments under vLLM's own names (max_num_seqs, gpu_memory_utilization, enforce_eager,
    ...). How much a step holds (max_num_batched_tokens, max_num_seqs) is chosen from the prompts' mean length and
    `limits.ring_bytes` where it is not set."""


class LimitsConfig(Section):
    """Bounds on memory, retries and time."""

    ring_bytes: int = Field(default=1024**3, gt=0)
    """Host memory of one engine for rows between the forward pass and the disk; the engine waits when it is full."""
    writer_threads: int = Field(default=4, gt=0)
    """Threads that write shard files, for each engine process."""
    attempts: int = Field(default=3, gt=0)
    """Attempts for a unit before the run stops with its error."""
    engine_restarts: int = Field(default=5, ge=0)
    """Engine deaths without a commit in between before the run stops; one that is given up counts as dead."""
    stall_s: float | Literal["never"] = 900.0
    """Seconds, at least 5, after which an engine that holds units and makes no progress (no token, row, step, written
    byte or sealed file, or no answer at all) is given up and replaced. Longer than the longest step and the longest
    `fsync` of a shard file. "never" waits for ever."""
    disk_reserve_bytes: int = Field(default=1024**3, ge=0)
    """Free space that must remain on the store's disk after the predicted bytes."""

    @field_validator("stall_s", mode="before")
    @classmethod
    def _stall_is_seen(cls, value: Any) -> Any:
        if value is None or value == "never":
            return "never"  # TOML has no null
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Engines are asked for their counters once a second: less would take an engine that works for a stalled one.
        if not is_number or not 5 <= value < math.inf:
            raise ValueError(f'stall_s must be a number of seconds, at least 5, or "never", not {value!r}')
        return value


class RunConfig(Section):
    """Everything one run is made of."""

    model: ModelConfig
    dataset: DatasetConfig
    tokenization: TokenizationConfig = TokenizationConfig()
    capture: CaptureConfig
    store: StoreConfig
    engine: EngineConfig = EngineConfig()
    limits: LimitsConfig = LimitsConfig()
    seed: int = 0
    """Seed of the shuffle and of sampled rows."""

    @model_validator(mode="after")
    def _roles_have_messages(self) -> RunConfig:
        if self.capture.rows.roles and self.dataset.messages_column is None:
            raise ValueError(
                "capture.rows.roles needs chat messages: set dataset.messages_column, or leave out capture.rows.roles"
            )
        return self

    @model_validator(mode="after")
    def _logprobs_are_raw(self) -> RunConfig:
        mode = self.engine.vllm.get("logprobs_mode", "raw_logprobs")
        if self.capture.generation.logprobs and mode != "raw_logprobs":
            raise ValueError(
                f'engine.vllm.logprobs_mode = "{mode}" cannot be used with capture.generation.logprobs: tokens/logprob '
                "holds raw logprobs in every run"
            )
        return self

    def content(self) -> dict[str, Any]:
        """The settings that decide what is stored, as JSON-ready values; the store's path is not one of them."""
        dumped = self.model_dump(mode="json", exclude={"engine", "limits"})
        del dumped["store"]["path"]
        del dumped["tokenization"]["processes"]
        if values := {name: value for name, value in self.engine.vllm.items() if name in _VALUE_ARGUMENTS}:
            dumped["engine"] = {"vllm": values}
        return dumped

    def content_hash(self) -> str:
        """sha256 (hex) over `content()` in canonical JSON."""
        canonical = json.dumps(self.content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file and apply `section.key=value` overrides (the value in TOML syntax, a bare word is a string).

    Raises:
        ConfigError: the file is missing or no TOML, a key is unknown, or a value does not fit.
    """
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        _apply_override(raw, override)
    return parse_config(raw, origin=str(path))


def parse_config(raw: Mapping[str, Any], origin: str = "configuration") -> RunConfig:
    """Validate a plain mapping; see `load_config`."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(problem) for problem in error.errors()]
        raise ConfigError(f"{origin}: " + "; ".join(lines)) from error


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f'override "{override}" is not of the form section.key=value')
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, leaf = key.strip().split(".")
    table = raw
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f'override "{override}": {section} is a value, not a section')
    table[leaf] = value


def _explain(problem: Mapping[str, Any]) -> str:
    location = [str(part) for part in problem["loc"]]
    where = ".".join(location)
    if problem["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        close = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = f'did you mean "{close[0]}"?' if close else f"known keys: {', '.join(sorted(known))}"
        return f'unknown key "{where}"; {hint}'
    if problem["type"] == "missing":
        return f'"{where}" is required'
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f'"{where}": {message}' if where else message


def _known_keys(sections: Sequence[str]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for section in sections:
        annotation = model.model_fields[section].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
