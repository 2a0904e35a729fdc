"""Harvester: one rank's whole harvest, driven by the worker class and the runner adapter.

Order of calls in a step: `register` (worker, before the pass) → `begin_step` (runner, order known) → taps fire →
`end_step` (worker, after sampling). `begin_unit`, `seal_unit`, `abort_unit` and `poll` come from the actor between
steps.

Invariant: an exception here must not leave the engine's step, which would end or hang the engine. It is kept, fails
every attempt in flight, and is reported by `poll`.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from actors.host_rows import ArrayRows
from actors.logprobs import LOGPROBS
from actors.profile import WorkerTimes
from actors.protocol import EngineSpec, InvokeOutcome, UnitFailure
from actors.sealing import seal_unit
from actors.selection import Selection
from actors.sink import NullWriter, Sealed, Sink, StepBatch
from actors.worker import self_test
from actors.worker.depth import Depth, shorten
from actors.worker.locations import Location, last_layer_needed, resolve_locations
from actors.worker.pass_clock import PassClock
from actors.worker.reduction import Reductions, StepReducer
from actors.worker.rows import Registration, RowBook, StepTake
from actors.worker.self_test import SELF_TEST_UNIT, SelfTest
from actors.worker.step import StepRows
from actors.worker.step_times import StepTimes
from actors.worker.taps import TapSet
from actors.worker.transfer import Transfer
from storage.unit_writer import UnitWriter

_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkState:
    """Counters of one rank's sink."""

    pending_bytes: int
    written_bytes: int
    n_rows: int
    n_steps: int
    n_recomputed: int
    """Tokens computed again after preemptions."""
    depth: Depth | None
    times: WorkerTimes


class Harvester:
    """Owns the taps, the row book, the transfer and the sink of one rank."""

    def __init__(self, spec: EngineSpec, *, device: torch.device, rank: int, tp_size: int, static_rows: int) -> None:
        self.graphed = False
        self.depth: Depth | None = None
        self._spec = spec
        self._device = device
        self._rank = rank
        self._tp_size = tp_size
        self._static_rows = static_rows
        self._book = RowBook()
        self._transfer = Transfer(device, timed=spec.profile)
        self._times = StepTimes(PassClock() if spec.profile and device.type == "cuda" else None)
        self._array_of: dict[str, str] = {}
        self._locations: tuple[Location, ...] = ()
        self._self_test = SelfTest()
        self._taps: TapSet | None = None
        self._sink: Sink | None = None
        self._reductions = Reductions(
            spec.selection.reduce, store_dtype=_TORCH_DTYPES[spec.layout.locations[0].dtype], device=device
        )
        self._take: StepTake | None = None
        self._reducer: StepReducer | None = None
        self._step_ids: Tensor | None = None
        self._failures: list[UnitFailure] = []
        self._in_flight: set[tuple[int, int]] = set()
        self._n_rows = 0
        self._n_steps = 0

    # -- start ---------------------------------------------------------------------------------------------------

    def install(self, model: nn.Module, static_forward_context: dict[str, Any]) -> None:
        """Resolve the locations on the loaded model, stop it after the last of them, wrap them, open the sink.

        Args:
            model: loaded, before its first forward.
            static_forward_context: vLLM's registry of attention layers.
        """
        spec = self._spec
        locations = resolve_locations(model, spec.locations)
        self._check_layout(locations)
        stop = spec.stop_early and not spec.generates and not spec.selection.takes_generated
        last_layer = last_layer_needed(locations) if stop else None
        self.depth = shorten(model, last_layer, static_forward_context)
        # Replicated rows are the same on all ranks: location i is handed out by rank i mod tp, to spread the copying.
        owned = [loc for index, loc in enumerate(locations) if index % self._tp_size == self._rank]
        self._taps = TapSet(
            locations=locations,
            owned=frozenset(loc.name for loc in owned),
            store_dtype=_TORCH_DTYPES[spec.layout.locations[0].dtype],
            static_rows=self._static_rows,
        )
        dtype = next(model.parameters()).dtype
        self._taps.install(model, device=self._device, dtype=dtype, tp_size=self._tp_size)
        self._locations = locations
        self._array_of = {loc.name: f"acts/{loc.array}" for loc in owned}
        arrays = list(self._array_of.values())
        if self._rank == 0:
            arrays += ["tokens/id", "tokens/position", "tokens/invoke"]
        # Not through the sink: log-probabilities come from the engine, with the outcomes.
        further = [LOGPROBS] if self._rank == 0 and spec.layout.logprobs else []
        self._sink = Sink(
            open_writer=partial(self._open_writer, [*arrays, *further]),
            seal_writer=self._seal_writer,
            arrays=arrays,
            threads=spec.writer_threads,
            join_bytes=spec.ring_bytes // 8,
        )

    def _check_layout(self, locations: Sequence[Location]) -> None:
        for found, planned in zip(locations, self._spec.layout.locations, strict=True):
            if (found.array, found.width) != (planned.name, planned.width):
                raise ValueError(
                    f"the loaded model has {found.name} as {found.array} with width {found.width}, the plan has "
                    f"{planned.name} with width {planned.width}; was the model changed after planning?"
                )

    def _open_writer(self, arrays: list[str], unit: int, attempt: int) -> Any:
        spec = self._spec
        if spec.null_sink:
            return NullWriter()
        return UnitWriter(Path(spec.run_path), spec.layout, unit=unit, attempt=attempt, arrays=arrays)

    def _seal_writer(self, writer: Any, outcomes: Sequence[InvokeOutcome]) -> Any:
        if isinstance(writer, NullWriter):
            return None
        return seal_unit(writer, outcomes, has_labels=self._rank == 0)

    # -- self-test -----------------------------------------------------------------------------------------------

    @property
    def _self_test_selection(self) -> Selection:
        """Not the run's own, nor reduced: the self-test looks at the taps themselves."""
        # Logits exist for the last token of a prompt only.
        return Selection(select="last" if any(x.alias == "logits" for x in self._locations) else "all")

    def _add_to_self_test(self, take: StepTake, taken: list[tuple[Location, Tensor]], ids: Tensor) -> None:
        host_ids = ids.cpu().numpy()[take.source_rows]
        for prompt in np.unique(take.invokes).tolist():
            mine = np.flatnonzero(take.invokes == prompt)
            self._self_test.add(
                prompt,
                host_ids[mine].tolist(),
                take.positions[mine].tolist(),
                {location.name: rows[mine].float().cpu().numpy() for location, rows in taken},
            )

    def end_self_test(self) -> list[str]:
        """Problems that the passes of the self-test have shown."""
        self._times.reset()
        failures = [failure.message for failure in self._failures]
        self._failures.clear()
        owned = [location.name for location in self._locations if location.name in self._array_of]
        wanted = self._self_test_selection.positions(n_prompt_tokens=len(self_test.PROMPTS[0]), max_tokens=1, invoke=0)
        return failures or self._self_test.problems(wanted=wanted.tolist(), names=owned)

    # -- a step --------------------------------------------------------------------------------------------------

    def register(self, scheduler_output: Any) -> None:
        """Learn of the new requests of a step and forget those that ended."""
        for new in scheduler_output.scheduled_new_reqs:
            parameters = new.sampling_params
            harvest = ((parameters and parameters.extra_args) or {}).get("harvest")
            if harvest is None or new.req_id in self._book:
                continue
            selection = self._self_test_selection if harvest["unit"] == SELF_TEST_UNIT else self._spec.selection
            registration = Registration.of(
                harvest, selection, max_tokens=parameters.max_tokens, token_ids=new.prompt_token_ids
            )
            self._book.register(new.req_id, registration)
        self._book.forget(scheduler_output.finished_req_ids)

    def begin_step(self, step: StepRows, input_ids: Tensor) -> None:
        """The batch is ordered; `input_ids` [rows] are on the device."""
        taps = self._require_taps()
        with self._times.choosing(step.n_rows):
            try:
                self._take = self._book.take(step)
                self._step_ids = input_ids
                self._reducer = self._reductions.begin_step(self._take)
                taps.begin_step(
                    self._take, n_rows=step.n_rows, graphed=self.graphed, device=self._device, reducer=self._reducer
                )
            except Exception as error:
                self._fail_attempts(error)
                self._take = None
                taps.begin_step(None, n_rows=step.n_rows, graphed=self.graphed, device=self._device)

    def end_step(self) -> None:
        """The pass is done: hand its rows to the sink."""
        take, ids = self._take, self._step_ids
        self._take = self._step_ids = None
        with self._times.gathering():
            if take is not None and ids is not None:
                self._hand_over(take, ids)

    def _hand_over(self, take: StepTake, ids: Tensor) -> None:
        taps, sink = self._require_taps(), self._require_sink()
        try:
            # ids first: end_step closes the step's selection.
            step_ids = taps.take_rows(ids, None) if self._rank == 0 else None
            taken = taps.end_step()
            if (reducer := self._reducer) is not None:
                taken = [(x, self._reductions.end_step(x.name, rows, reducer)) for x, rows in taken]
                step_ids = None if step_ids is None else step_ids.index_select(0, reducer.last_rows_E)
            self._n_steps += 1
            if not len(take.segments):
                return  # all of its requests go on
            rows = [tensor for _, tensor in taken]
            arrays = [self._array_of[location.name] for location, _ in taken]
            if step_ids is not None:
                rows.append(step_ids.to(torch.int32))
                arrays.append("tokens/id")
            if take.segments.attempts[0][0] == SELF_TEST_UNIT:
                self._add_to_self_test(take, taken, ids)
                return
            host_rows: list[Any] = list(self._transfer.start(rows))
            if step_ids is not None:
                host_rows += [ArrayRows(take.positions), ArrayRows(take.invokes)]
                arrays += ["tokens/position", "tokens/invoke"]
            sink.submit(StepBatch(rows=dict(zip(arrays, host_rows, strict=True)), segments=take.segments))
            self._n_rows += len(take.positions)
        except Exception as error:
            self._fail_attempts(error)

    def _fail_attempts(self, error: Exception) -> None:
        traceback.print_exception(error)
        for unit, attempt in sorted(self._in_flight) or [(SELF_TEST_UNIT, 0)]:
            self._failures.append(UnitFailure.of(unit, attempt, error))
            self._book.forget_unit(unit, attempt)

    # -- from the actor, between steps -----------------------------------------------------------------------------

    def begin_unit(self, unit: int, attempt: int) -> None:
        """Begin the attempt: its staged files are opened in the background."""
        self._require_sink().open_unit(unit, attempt)
        self._in_flight.add((unit, attempt))

    def seal_unit(self, unit: int, attempt: int, outcomes: Sequence[InvokeOutcome]) -> None:
        """All requests of the attempt have ended: seal in the background."""
        self._book.forget_unit(unit, attempt)
        self._require_sink().seal(unit, attempt, outcomes)

    def abort_unit(self, unit: int, attempt: int) -> None:
        """Drop the attempt."""
        self._book.forget_unit(unit, attempt)
        self._in_flight.discard((unit, attempt))
        self._require_sink().abort(unit, attempt)

    def poll(self) -> tuple[SinkState, list[Sealed | UnitFailure]]:
        """Counters, and what has ended since the last call."""
        sink = self._require_sink()
        results: list[Sealed | UnitFailure] = [*sink.poll(), *self._failures]
        self._failures.clear()
        for result in results:
            self._in_flight.discard((result.unit, result.attempt))
        state = SinkState(
            pending_bytes=sink.pending_bytes,
            written_bytes=sink.written_bytes,
            n_rows=self._n_rows,
            n_steps=self._n_steps,
            n_recomputed=self._book.n_recomputed,
            depth=self.depth,
            times=self._times.joined(sink.times, copy_s=self._transfer.copy_s),
        )
        return state, results

    def close(self) -> None:
        """Stop the sink's threads."""
        if self._sink is not None:
            self._sink.close()

    def _require_taps(self) -> TapSet:
        if self._taps is None:
            raise RuntimeError("the model is not loaded yet")
        return self._taps

    def _require_sink(self) -> Sink:
        if self._sink is None:
            raise RuntimeError("the model is not loaded yet")
        return self._sink
