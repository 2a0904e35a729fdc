"""Values that cross the boundary between driver and engines, and the Engine protocol.

Frozen, keyword-only, picklable. Rows never appear here: they go from the worker's sink to the shard files.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from actors.processes import ProcessId
from actors.profile import EngineProfile
from actors.selection import Selection
from storage.format import StoreLayout
from storage.unit_writer import UnitReceipt


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """All an engine needs to start."""

    run_path: str
    """Absolute path of the run folder, the same on every node."""
    model: str
    """Local folder or Hugging Face id."""
    locations: tuple[str, ...]
    """Canonical location names, in the layout's order."""
    layout: StoreLayout
    selection: Selection
    sampling: dict[str, Any]
    """vLLM SamplingParams arguments; `max_tokens` is per invoke."""
    generates: bool = False
    """More than one token may be generated, so the end of an answer must be known."""
    seed: int = 0
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    max_model_len: int | None = None
    trust_remote_code: bool = False
    tokenizer: str | None = None
    revision: str | None = None
    model_sha256: str | None = None
    """`actors.model_files.fingerprint_model` of the planned model; None: not checked."""
    lora_sha256: str | None = None
    """The planned adapter's fingerprint; None: not checked."""
    lora: str | None = None
    """Folder or Hugging Face id of the adapter that is applied to every prompt."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Further engine arguments under vLLM's names."""
    ring_bytes: int = 1 << 30
    writer_threads: int = 4
    prompt_tokens: float = 0.0
    """Mean length of the run's prompts; decides how many requests make a full step. 0: not known."""
    stop_early: bool = True
    """Stop the forward after the last wanted layer, where nothing later is needed."""
    driver_silence_s: float = 120.0
    """An engine that hears nothing of its driver for so long ends itself: the driver is gone or cut off."""
    fake: dict[str, Any] | None = None
    """Fields of `actors.fake_engine.Script`: run the scripted engine instead of vLLM."""
    null_sink: bool = False
    """Drop rows once they are in host memory: for measurements."""
    profile: bool = False
    """Measure passes and copies on the device too."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's rows at all locations, without labels."""
        return self.layout.location_row_bytes

    def compute_hash(self) -> str:
        """Part of vLLM's compile cache key (the spec is its `additional_config`): what changes the compiled graph."""
        taps = [(location.name, location.path, location.width) for location in self.layout.locations]
        return hashlib.sha256(json.dumps(taps).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """One attempt at one unit by one engine generation."""

    unit: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class InvokeOutcome:
    """How an invoke ended."""

    invoke: int
    unit_row: int
    """First row, counted inside the unit."""
    n_planned_rows: int
    n_rows: int
    """Rows that count; the rest of the planned ones are holes."""
    status: str
    """`ok`, or `truncated` when the prompt was cut to the model's length."""
    may_have_surplus: bool = False
    """Rows after the end may have been taken and must be given back."""
    logprobs: NDArray[np.float32] | None = field(default=None, compare=False)
    """[n_rows] log-probability of each row's token, where the store has them; see `actors.logprobs`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What a finished attempt returns to the driver."""

    lease: Lease
    storage: UnitReceipt | None
    """Files, digests and row counts of the staged unit; None from a null sink."""
    n_invokes: int
    n_prompt_tokens: int
    n_generated_tokens: int
    n_rows: int
    stored_bytes: int
    engine_s: float
    """From the first request to the last row."""
    seal_s: float
    """From the last row to the fsynced files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitFailure:
    """An attempt that failed while its engine lives."""

    unit: int
    attempt: int
    kind: str
    """Class name of the error."""
    message: str
    traceback: str

    @classmethod
    def of(cls, unit: int, attempt: int, error: BaseException) -> UnitFailure:
        """Describe an exception."""
        return cls(
            unit=unit,
            attempt=attempt,
            kind=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Counters of a living engine since it started."""

    n_tokens: int = 0
    """Prompt and generated tokens that passed through the model."""
    n_rows: int = 0
    written_bytes: int = 0
    pending_bytes: int = 0
    n_steps: int = 0
    n_recomputed: int = 0
    """Tokens computed again after preemptions: a sign of too little KV cache."""
    pid: int = 0
    compute_dtype: str = ""
    """Dtype in which the model runs."""
    n_layers: int = 0
    """Decoder layers of the model."""
    n_layers_run: int = 0
    """Those that run: fewer where the forward stops after the last wanted one."""
    gated_s: float = 0.0
    """Time in which the engine waited because rows on their way to disk filled the ring."""
    profile: EngineProfile = field(default_factory=EngineProfile)
    """Where the engine's time went since it was ready."""


class Engine(Protocol):
    """What the driver's pool asks of an engine actor."""

    def start(self) -> EngineStats:
        """Build the engine; returns when it can serve."""
        ...

    def run_unit(self, lease: Lease) -> Receipt | UnitFailure:
        """Harvest one unit into its attempt's staged files and seal them."""
        ...

    def stats(self) -> EngineStats:
        """Counters, at once; never answered by the thread that steps the engine, which may hang."""
        ...

    def process(self) -> ProcessId:
        """Which process this is, for when it no longer answers."""
        ...

    def hear(self) -> None:
        """The driver lives."""
        ...
