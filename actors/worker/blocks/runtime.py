"""BlockRuntime: runs the blocks of an engine's requests inside its forward pass.

A runner adapter drives it, in this order, on one thread:

    add_request ... begin_step(rows) [modules run] end_forward() serve_logits() serve_samples() end_step() ... finish()

The runtime never raises because of a block: a block that fails is recorded, its request is named in `ended_requests`
so that the scheduler can end it, and the pass goes on for everyone else. Requests that it was not told about are
ignored.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from actors.worker.blocks.errors import (
    LocationError,
    LocationNotReachedError,
    LoopCut,
    OutOfOrderError,
    RequestFinishedError,
    SplitPromptError,
)
from actors.worker.blocks.layer_graphs import LayerGraphs
from actors.worker.blocks.modes import BlockModes
from actors.worker.blocks.recording import ModuleCache, Recorder
from actors.worker.blocks.refs import END_OF_REQUEST, ModelRef, ModuleRef, TracerRef
from actors.worker.blocks.sites import ModuleSites, Site, install_sites
from actors.worker.blocks.task import BlockTask, Wait
from actors.worker.blocks.visit import Passage, Visit
from actors.worker.blocks.watchdog import Watchdog
from actors.worker.blocks.wire import BlockCode, BlockOutcome, Parcel, Reference, unpack
from actors.worker.step import StepRows

if TYPE_CHECKING:
    from actors.worker.blocks.tp_layout import Layouts, SiteLayout

_SPLIT_PROMPT = (
    "the engine split the prompt over steps, so the block cannot see it whole. Engines that serve blocks run without "
    "chunked prefill and prefix caching, and never preempt"
)

_current: BlockRuntime | None = None


def current_runtime() -> BlockRuntime | None:
    """The runtime whose block runs right now in this process, if any."""
    return _current


class BlockRuntime:
    """See the module.

    Args:
        model: the engine's model, loaded; its modules' forwards are wrapped here.
        device: where the engine's tensors live.
        tp_size: ranks of the engine. All ranks run every block, on full-width values.
        layouts: how values are spread over the ranks; needed when there are several.
        make_tokenizer: makes the tokenizer the first time that a block asks for it.
        block_time_limit_s: the longest that a block may run between two locations; None for no limit.
        graphs: launches layers in which no block waits; None: all modules run one by one.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        tp_size: int = 1,
        layouts: Layouts | None = None,
        make_tokenizer: Callable[[], Any] | None = None,
        block_time_limit_s: float | None = None,
        graphs: LayerGraphs | None = None,
    ) -> None:
        self.active = False
        self.graphs = graphs if graphs is not None else LayerGraphs(None)
        self.step_number = 0
        self.caller = ""
        self.current: BlockTask | None = None
        self.ended_requests: set[str] = set()
        self.modes = BlockModes()
        self.watchdog = Watchdog(block_time_limit_s)
        self.logits_site = Site("logits", per_request=True)
        self.samples_site = Site("samples", per_request=True)
        self._device = device
        self._tp_size = tp_size
        self._layouts = layouts
        self._make_tokenizer = make_tokenizer
        self._tokenizer: Any = None
        self._tasks: dict[str, BlockTask] = {}
        self._live: list[BlockTask] = []
        self._n_rows = 0
        self._n_requests = 0
        self._n_vocab: int | None = None
        self._sampling = False
        self._refs: dict[str, ModuleRef] = {}
        self._sites = install_sites(model, self)
        self._model_ref = ModelRef(self, "", self._sites[""])
        self._tracer_ref = TracerRef(self)

    # -- driven by the runner -----------------------------------------------------------------------------------

    def add_request(self, request_id: str, block: dict[str, Any]) -> None:
        """Take on a request's block, as it came in `extra_args[EXTRA_ARGS_KEY]`."""
        self._tasks[request_id] = BlockTask(self, request_id, block["key"], block["payload"], block)

    def begin_step(self, rows: StepRows | None, *, n_padded_rows: int | None = None) -> None:
        """Before the forward pass.

        Args:
            rows: who owns which rows; None for a pass without requests (profiling).
            n_padded_rows: rows of the pass's tensors, when there is padding behind the requests' rows.
        """
        self.step_number += 1
        self._live = []
        self._sampling = False
        self.active = False
        self.graphs.end()
        if rows is None:
            return
        self._n_rows = rows.n_rows if n_padded_rows is None else n_padded_rows
        self.graphs.begin(self._n_rows)
        if not self._tasks:
            return
        self._n_requests = len(rows.request_ids)
        starts = rows.starts.tolist()
        due: list[tuple[BlockTask, BaseException | None]] = []
        for slot, request_id in enumerate(rows.request_ids):
            task = self._tasks.get(request_id)
            if task is None:
                continue
            task.step += 1
            task.slot, task.start, task.stop = slot, starts[slot], starts[slot + 1]
            task.live_step = self.step_number
            self._live.append(task)
            if task.done:
                continue
            if rows.first_positions[slot] != 0 if task.step == 0 else task.stop - task.start > 1:
                due.append((task, SplitPromptError(_SPLIT_PROMPT)))
            elif task.wait is Wait.START or (
                task.wait in (Wait.STEP, Wait.OPEN_STEP) and task.wanted_step <= task.step
            ):
                due.append((task, None))
        if due:
            with self._blocks_run():
                for task, error in due:
                    task.resume(throw=error)
        self.active = any(not task.done or task.recording for task in self._live)

    def end_forward(self) -> None:
        """After the model's forward, before logits: from here on there is one row per request."""
        self._sampling = True
        self.graphs.end()

    def serve_logits(self, logits: Tensor) -> None:
        """Offer `[requests, vocab]`; edits are written into it."""
        self._n_vocab = logits.shape[-1]
        self._serve_engine_value(self.logits_site, logits)

    def serve_samples(self, token_ids: Tensor) -> None:
        """Offer `[requests, 1]`; edits are written into it."""
        self._serve_engine_value(self.samples_site, token_ids)

    def end_step(self) -> None:
        """After sampling: a block that still waits for a location of this step has asked in vain."""
        late = [task for task in self._live if task.wait is Wait.LOCATION]
        if late:
            with self._blocks_run():
                for task in late:
                    assert task.site is not None
                    task.resume(
                        throw=LocationNotReachedError(
                            f"step {task.step} ended without reaching {task.site.name}: the model does not run it in "
                            "this step"
                        )
                    )
        self.active = False

    def take_ended(self) -> set[str]:
        """Requests whose block failed or called stop() since the last call; the scheduler should end them."""
        ended, self.ended_requests = self.ended_requests, set()
        return ended

    def finish(self, key: str, output: Any) -> list[BlockOutcome]:
        """The requests that carry `key` are over: let their blocks end, and give up what they kept.

        Args:
            key: the key that came with the block; sequences of one request (`n` > 1) share it.
            output: what `tracer.result` is.
        """
        found = [task for task in self._tasks.values() if task.key == key]
        found.sort(key=lambda task: _sequence_index(task.request_id))
        with self._blocks_run():
            for task in found:
                self._finish(task, output)
                self._stop_recording(task)
                del self._tasks[task.request_id]
        return [
            BlockOutcome(
                saves=task.saves,
                value=task.value,
                steps=task.step + 1,
                cut=task.cut,
                stopped=task.stopped,
                failure=task.failure,
            )
            for task in found
        ]

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests that nobody will collect (aborted)."""
        found = [task for request_id in request_ids if (task := self._tasks.pop(request_id, None)) is not None]
        if found:
            with self._blocks_run():
                for task in found:
                    task.kill()
                    self._stop_recording(task)

    @property
    def n_tasks(self) -> int:
        return len(self._tasks)

    def close(self) -> None:
        self.drop(list(self._tasks))
        self.graphs.close()
        self.watchdog.close()

    # -- used by a running block --------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            if self._make_tokenizer is None:
                raise LocationError("this engine has no tokenizer")
            self._tokenizer = self._make_tokenizer()
        return self._tokenizer

    def task(self) -> BlockTask:
        task = self.current
        if task is None:
            raise RuntimeError("a location can be read only while its block runs")
        return task

    def ref(self, path: str) -> ModuleRef:
        ref = self._refs.get(path)
        if ref is None:
            sites = self._sites.get(path)
            if sites is None:
                raise LocationError(f"the model has no module {path!r}; print the model to see its tree")
            ref = self._refs[path] = ModuleRef(self, path, sites)
        return ref

    def read(self, site: Site, part: Callable[[Any], Any]) -> Any:
        visit = self._visit(site)
        return visit.read(part(visit.value))

    def write(self, site: Site, part: Callable[[Any], Any], value: Any) -> None:
        visit = self._visit(site)
        visit.replace(part(visit.value), value)

    def result(self) -> Any:
        task = self.task()
        task.location = "tracer.result"
        return task.park(Wait.RESULT)

    def start_cache(
        self, modules: list[Any] | None, *, sides: tuple[str, ...], device: str | None, dtype: torch.dtype | None
    ) -> ModuleCache:
        """`tracer.cache`: from the running step on."""
        task = self.task()
        if modules is None:
            paths = list(self._sites)
        else:
            paths = [module._path if isinstance(module, ModuleRef) else str(module) for module in modules]
        cache = ModuleCache()
        for path in paths:
            sites = self.ref(path)._sites
            for side in sides:
                site: Site = sites.output if side == "output" else sites.input
                if modules is not None and site.seen_step == self.step_number:
                    raise OutOfOrderError(f"step {task.step} has gone past {site.name}; open the cache first")
                site.recorders.append(
                    Recorder(task=task, cache=cache, path=path, is_output=side == "output", device=device, dtype=dtype)
                )
                task.recording.append(site)
        return cache

    def source_of(self, sites: ModuleSites) -> Any:
        from actors.worker.blocks.operations import source_of

        is_new = sites.source is None
        source = source_of(self, sites, tp_size=self._tp_size)
        if is_new:
            self.graphs.changed(sites.path)
        return source

    def call_module(self, sites: ModuleSites, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module on a block's own tensors; nobody else's block sees that."""
        before, self.active = self.active, False
        n_rows, self.graphs.n_rows = self.graphs.n_rows, 0
        try:
            return sites.module(*[_unref(arg) for arg in args], **{name: _unref(arg) for name, arg in kwargs.items()})
        finally:
            self.active, self.graphs.n_rows = before, n_rows

    def call_function(self, function: Callable[..., Any]) -> Any:
        arguments = (self._model_ref, self._tracer_ref)
        n_wanted = len(inspect.signature(function).parameters)
        return function(*arguments[: min(n_wanted, 2)])

    def unpack_block(self, payload: Any) -> BlockCode:
        parcel = payload if isinstance(payload, Parcel) else Parcel(head=payload)
        code: BlockCode = unpack(parcel, self._resolve, self._device)
        return code

    def time_limit_struck(self, task: BlockTask) -> None:
        """Under TP the ranks may disagree on which of them was too slow, so the engine must not go on."""
        if self._tp_size > 1 and task.failure is not None:
            raise RuntimeError(f"block time limit: {task.failure.error}") from task.failure.error

    # -- inside -------------------------------------------------------------------------------------------------

    def _visit(self, site: Site) -> Visit:
        task = self.current
        if task is None:
            task = self.task()
        visit = task.visit
        if visit is not None and task.site is site:
            return visit
        if task.wait is Wait.RESULT:
            raise RequestFinishedError(
                "the request has finished, so no further step has this value; read tracer.result last"
            )
        task.location = site.name
        if site.seen_step == self.step_number:
            raise OutOfOrderError(
                f"step {task.step} has gone past {site.name}; read locations in the order in which the model runs "
                "them, and keep what you need in a variable"
            )
        task.site = site
        site.waiting.append(task)
        try:
            task.park(Wait.LOCATION)
        except BaseException:
            if task in site.waiting:
                site.waiting.remove(task)
            raise
        visit = task.visit
        assert visit is not None
        return visit

    def serve(self, site: Site, value: Any) -> Any:
        """A module is at `site`: let every block that waits there run; returns what the model goes on with."""
        waiting = [task for task in site.waiting if task.wait is Wait.LOCATION]
        site.waiting = []
        full, layout = value, None
        if self._tp_size > 1:
            layout = self._layout(site)
            try:
                full = value if layout is None else layout.gather(value)
            except LocationError as error:
                with self._blocks_run():
                    for task in waiting:
                        task.resume(throw=error)
                return value
        if site.per_request or self._sampling:
            n_rows = self._n_requests
            spans = [(task.slot, task.slot + 1) for task in waiting]
        else:
            n_rows = self._n_rows
            spans = [(task.start, task.stop) for task in waiting]
        passage = Passage(site.name, full, n_rows, spans, n_vocab=self._n_vocab if site is self.samples_site else None)
        changed = []
        with self._blocks_run():
            for task, (start, stop) in zip(waiting, spans, strict=True):
                visit = task.visit = Visit(passage, start, stop, task.write_back)
                task.resume()
                if visit.changed:
                    changed.append(visit)
        if not changed:
            return value
        self.graphs.forget_copies()
        current = passage.apply(changed)
        if layout is not None:
            return layout.scatter(current, value, in_place=not any(visit.replaces for visit in changed))
        return current

    def record(self, site: Site, value: Any) -> None:
        """A module is at `site`: copy the own rows of every request that records it."""
        recorders = [recorder for recorder in site.recorders if recorder.task.live_step == self.step_number]
        if not recorders:
            return
        if self._tp_size > 1:
            layout = self._layout(site)
            try:
                value = value if layout is None else layout.gather(value)
            except LocationError:
                return
        n_rows = self._n_requests if self._sampling else self._n_rows
        passage = Passage(site.name, value, n_rows, ())
        with self._blocks_run():
            for recorder in recorders:
                task = recorder.task
                start, stop = (task.slot, task.slot + 1) if self._sampling else (task.start, task.stop)
                recorder.take(Visit(passage, start, stop, False).read(value))

    def _stop_recording(self, task: BlockTask) -> None:
        for site in task.recording:
            site.recorders = [recorder for recorder in site.recorders if recorder.task is not task]
        task.recording = []

    def _layout(self, site: Site) -> SiteLayout | None:
        if site.layout is None and self._layouts is not None and not site.per_request:
            path, _, side = site.name.rpartition(".")
            site.layout = self._layouts.of(site.name, path, side)
        return site.layout

    @contextlib.contextmanager
    def _blocks_run(self) -> Iterator[None]:
        """Around switches to blocks: their modes in place, and this runtime the one that `harvest.save` finds."""
        global _current
        before, _current = _current, self
        self.watchdog.watch_this_thread()
        try:
            with self.modes:
                yield
        finally:
            _current = before

    def _serve_engine_value(self, site: Site, value: Tensor) -> None:
        if not self.active:
            return
        site.seen_step = self.step_number
        if site.waiting:
            current = self.serve(site, value)
            if current is not value:
                value.copy_(current)

    def _finish(self, task: BlockTask, output: Any) -> None:
        if task.wait is Wait.START:
            task.resume(throw=RuntimeError("the request ended before its first step"))
        while not task.done:
            if task.wait is Wait.OPEN_STEP:
                task.resume(END_OF_REQUEST)
            elif task.wait is Wait.STEP:
                task.cut = (task.wanted_step, task.step + 1)
                task.resume(throw=LoopCut())
            elif task.wait is Wait.RESULT:
                task.resume(output)
            else:
                task.resume(throw=LocationNotReachedError(f"the request ended before {task.location}"))

    def _resolve(self, reference: Reference) -> Any:
        kind, path = reference
        if kind == "module":
            return self.ref(path)
        if kind == "model":
            return self._model_ref
        if kind == "tracer":
            return self._tracer_ref
        if kind == "tokenizer":
            return self.tokenizer
        raise LocationError(f"a block refers to {reference}, which this engine does not know")


def _unref(value: Any) -> Any:
    return value._sites.module if isinstance(value, ModuleRef) else value


def _sequence_index(request_id: str) -> int:
    head = request_id.partition("_")[0]
    return int(head) if head.isdigit() else 0
