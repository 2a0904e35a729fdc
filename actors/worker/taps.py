"""Taps: copy declared locations out of the forward pass, in eager, compiled and graph-captured mode alike.

A tap is a custom op called from a wrapped `module.forward`, so the compiler keeps it and CUDA graphs replay it:

- passes of up to `static_rows` rows may be graph-captured: the op fills a static buffer, which is read after the pass;
- larger passes never are: the op's Python body runs each time and takes the wanted rows at once.

Invariants:
- what is handed out is a copy, made before any later kernel can overwrite the value;
- no synchronisation with the host;
- an exception never leaves the op: it is kept, and raised by `end_step`;
- a tap that did not fire in a step is an error by name.

Where a request's rows become one, they are reduced here, in float32, before they are rounded to the store's dtype.

Shape suffixes: P rows of the pass with padding, M taken rows, S requests of the step, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actors.worker.locations import Location, gather_full, read
from actors.worker.reduction import StepReducer, to_device
from actors.worker.rows import StepTake

_LIBRARY = torch.library.Library("harvest", "DEF")
_LIBRARY.define("tap(Tensor x, Tensor? residual, Tensor(a!) buffer, int slot) -> ()")

# Slots are unique in the process, since an int is all that a compiled graph may carry.
_TAPS: list[_Tap] = []


class TapError(RuntimeError):
    """A tap did not deliver the rows of a step."""


@dataclass(eq=False, slots=True)
class _Tap:
    owner: TapSet
    location: Location
    buffer_PD: Tensor
    fired: bool = False
    direct: Tensor | None = None
    error: Exception | None = None


def _receive(x: Tensor, residual: Tensor | None, buffer: Tensor, slot: int) -> None:
    tap = _TAPS[slot]
    try:
        tap.fired = True
        n_rows = x.shape[0]
        if n_rows <= buffer.shape[0]:
            if residual is None:
                buffer[:n_rows].copy_(x)
            else:
                torch.add(x, residual, out=buffer[:n_rows])
        else:
            tap.direct = tap.owner.take_rows(x, residual, tap.location)
    except Exception as error:
        tap.error = error


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("tap", _receive, _device)
_LIBRARY.impl("tap", lambda x, residual, buffer, slot: None, "Meta")


class TapSet:
    """The taps of one model on one rank.

    Args:
        locations: what is tapped; locations of other ranks take part in collectives only.
        owned: names of the locations whose rows this rank hands out.
        store_dtype: dtype of the rows handed out.
        static_rows: largest pass that may be graph-captured, 0 where nothing is captured.
    """

    def __init__(
        self,
        *,
        locations: Sequence[Location],
        owned: frozenset[str],
        store_dtype: torch.dtype,
        static_rows: int,
    ) -> None:
        self._locations = tuple(locations)
        self._owned = owned
        self._store_dtype = store_dtype
        self._static_rows = static_rows
        self._taps: list[_Tap] = []
        self._take: StepTake | None = None
        self._n_rows = 0
        self._graphed = False
        self._index_M: Tensor | None = None
        self._sampled_M: Tensor | None = None
        self._reducer: StepReducer | None = None

    def install(self, model: nn.Module, *, device: torch.device, dtype: torch.dtype, tp_size: int) -> None:
        """Wrap the forwards of the tapped modules. Call at the end of `load_model`, before the first forward."""
        by_module: dict[str, list[tuple[Location, int, Tensor]]] = {}
        for location in self._locations:
            slot = -1
            buffer = torch.empty(0, location.width, dtype=dtype, device=device)
            if location.name in self._owned:
                # Logits are computed outside of the pass, for rows of their own, and never captured.
                n_static = 0 if location.alias == "logits" else self._static_rows
                buffer = torch.zeros(n_static, location.width, dtype=dtype, device=device)
                tap = _Tap(self, location, buffer)
                slot = len(_TAPS)
                _TAPS.append(tap)
                self._taps.append(tap)
            by_module.setdefault(location.module, []).append((location, slot, buffer))
        for path, taps in by_module.items():
            _wrap_forward(model.get_submodule(path), taps, tp_size)

    def begin_step(
        self,
        take: StepTake | None,
        *,
        n_rows: int,
        graphed: bool,
        device: torch.device,
        reducer: StepReducer | None = None,
    ) -> None:
        """Say which rows of the coming pass are wanted.

        Args:
            take: the wanted rows, None for none.
            n_rows: rows that belong to requests.
            graphed: the pass may be replayed from a graph, in which case the op's Python body does not run.
            device: of the model.
            reducer: makes one partial row for each request of what is taken; None: rows stay as they are.
        """
        self._take = take
        self._reducer = reducer
        self._n_rows = n_rows
        self._graphed = graphed
        self._index_M = self._sampled_M = None
        for tap in self._taps:
            tap.fired = False
            tap.direct = None
            tap.error = None
        if take is not None:
            if not take.leading:
                self._index_M = to_device(take.source_rows, device)
            if any(tap.location.alias == "logits" for tap in self._taps):
                self._sampled_M = to_device(take.sampled_rows, device)

    def take_rows(self, x_PD: Tensor, residual_PD: Tensor | None, location: Location | None = None) -> Tensor:
        """A copy [M, D] of the wanted rows in the store's dtype (in its own dtype without a location).

        With a reducer, and a location: [S, D] float32, one partial row for each request.
        """
        take = self._take
        if take is None:
            # Profiling pass: copy all rows, so that the copy is part of the measured memory.
            rows = x_PD if residual_PD is None else x_PD + residual_PD
        elif location is not None and location.alias == "logits":
            assert self._sampled_M is not None
            rows = x_PD.index_select(0, self._sampled_M)
        elif self._index_M is None:
            n_taken = len(take.source_rows)
            rows = x_PD[:n_taken] if residual_PD is None else x_PD[:n_taken] + residual_PD[:n_taken]
        else:
            rows = x_PD.index_select(0, self._index_M)
            if residual_PD is not None:
                rows = rows.add_(residual_PD.index_select(0, self._index_M))
        if self._reducer is not None and location is not None:
            return self._reducer.reduce(rows)
        dtype = self._store_dtype if location is not None else rows.dtype
        return rows.to(dtype, copy=rows.data_ptr() == x_PD.data_ptr()).contiguous()

    def end_step(self) -> list[tuple[Location, Tensor]]:
        """The taken rows of each owned location, on the device: as `take_rows` has them.

        Raises:
            TapError: a tap failed or did not fire.
        """
        if self._take is None:
            return []
        taken: list[tuple[Location, Tensor]] = []
        for tap in self._taps:
            name = tap.location.name
            if tap.error is not None:
                raise TapError(f"the tap at {name} ({tap.location.path}) failed: {tap.error}") from tap.error
            if not tap.fired and not (self._graphed and len(tap.buffer_PD)):
                raise TapError(f"the tap at {name} ({tap.location.path}) did not fire in a step of {self._n_rows} rows")
            rows = tap.direct
            if rows is None:
                if self._n_rows > tap.buffer_PD.shape[0]:
                    raise TapError(f"the tap at {name} fired without rows for a step of {self._n_rows} rows")
                rows = self.take_rows(tap.buffer_PD, None, tap.location)
            tap.direct = None
            taken.append((tap.location, rows))
        self._take = None
        return taken


def _wrap_forward(module: nn.Module, taps: Sequence[tuple[Location, int, Tensor]], tp_size: int) -> None:
    before = tuple(tap for tap in taps if tap[0].side != "output")
    after = tuple(tap for tap in taps if tap[0].side == "output")
    forward = module.forward

    def tapped(*args: object, **kwargs: object) -> object:
        for location, slot, buffer in before:
            _tap(location, slot, buffer, args, kwargs, None, tp_size)
        output = forward(*args, **kwargs)
        for location, slot, buffer in after:
            _tap(location, slot, buffer, args, kwargs, output, tp_size)
        return output

    module.forward = tapped


def _tap(
    location: Location,
    slot: int,
    buffer: Tensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    output: object,
    tp_size: int,
) -> None:
    x, residual = read(location, args, kwargs, output)
    if tp_size > 1:
        # A collective: every rank passes here for each pass, whoever owns the location.
        x = gather_full(location, x)
        residual = None if residual is None else gather_full(location, residual)
    if slot >= 0:
        torch.ops.harvest.tap(x, residual, buffer, slot)
