"""Traces and invokes: the `with` statements whose bodies become blocks.

A trace with a prompt is one request, and its whole body is the block. A trace without one runs its body here, in the
caller's process, where each `with tracer.invoke(prompt):` in it takes its own body as a block; the requests run
together when the trace ends.
"""

from __future__ import annotations

import builtins
import sys
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from actors.worker.blocks.engine import BlockRequest
from actors.worker.blocks.names import NAMED_NAME, SAVE_NAME
from actors.worker.blocks.refs import BARRIER_MESSAGE
from actors.worker.blocks.task import ATOMS
from actors.worker.blocks.wire import BlockCode, Reference, Referenced, pack
from harvest.blocks.body import CompiledBody, compile_body, values_of
from harvest.blocks.capture import BodySkipper, SkipBody, WithBody, find_body
from harvest.blocks.frames import assign_names
from harvest.blocks.prompts import to_vllm_prompt
from harvest.blocks.results import BlockResult, make_results, merge_saves, raise_failures, report_cut_loops
from harvest.blocks.sampling import checked_sampling

if TYPE_CHECKING:
    from harvest.blocks.vllm import VLLM

_NO_PROMPT = object()
_saving: list[SavedHere] = []
"""The traces whose bodies run in this process right now; the innermost last."""


class _Capturing:
    """A context whose body is taken from source instead of run."""

    _skipper: BodySkipper | None = None
    _body: WithBody | None = None
    _frame: FrameType | None = None

    def _enter(self, frame: FrameType) -> None:
        if self._frame is not None:
            raise RuntimeError("this trace was entered before; make a new one for each `with`")
        self._frame = frame
        self._body = find_body(frame)
        self._compiled()
        self._skipper = BodySkipper(frame, self._body.first)
        self._skipper.start()

    def _leave(self, error: BaseException | None) -> bool:
        """Whether the body is to be used: False when something else than the skip ended it."""
        assert self._skipper is not None
        self._skipper.stop()
        return error is None or isinstance(error, SkipBody)

    def _compiled(self) -> CompiledBody:
        assert self._body is not None
        return compile_body(self._body)

    def _block(self, model: VLLM) -> bytes:
        """The body as a block, with the values that it reads from the frame."""
        assert self._frame is not None
        compiled = self._compiled()
        names = values_of(compiled.reads, self._frame)
        code = BlockCode(
            code=compiled.marshalled,
            function=None,
            names=names,
            filename=compiled.filename,
            source=compiled.text,
            saved_names=tuple(name for name, value in names.items() if _saving and _saving[-1].holds(value)),
        )
        return pack_block(code, model)


class Trace(_Capturing, Referenced):
    """`with model.trace(...) as tracer:`.

    After the `with`, `results` holds one BlockResult per request, and `result` the RequestOutput of the only one.
    """

    def __init__(self, model: VLLM, prompt: Any, options: dict[str, Any]) -> None:
        self._model = model
        self._prompt = prompt
        self._lora_request = options.pop("lora_request", None)
        self._strict = bool(options.pop("strict", model.strict))
        self._sampling = checked_sampling(options)
        self._vllm_prompt = None if prompt is _NO_PROMPT else to_vllm_prompt(prompt)
        self._requests: list[BlockRequest] = []
        self._open = False
        self.results: list[BlockResult] = []

    def wire_reference(self) -> Reference:
        return ("tracer", "")

    def __enter__(self) -> Trace:
        self._enter(sys._getframe(1))
        self._open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        try:
            if not self._leave(error):
                return False
            assert self._frame is not None
            if self._prompt is _NO_PROMPT:
                saved = self._run_body_here()
                self._finish(saved)
            else:
                self._requests.append(
                    BlockRequest(
                        prompt=self._vllm_prompt,
                        sampling=self._sampling,
                        payload=self._block(self._model),
                        clone_reads=self._model.clone_reads,
                        lora_request=self._lora_request,
                    )
                )
                self._finish({})
            return True
        finally:
            self._open = False
            # The frame holds the caller's variables; a finished trace must not keep them alive.
            self._frame = None

    def invoke(self, prompt: Any = _NO_PROMPT, **sampling: Any) -> Invoke:
        """One request of this trace, to be entered by `with`; its settings win over the trace's."""
        if not self._open or self._prompt is not _NO_PROMPT:
            raise RuntimeError("open invokes inside `with model.trace() as tracer:`, a trace without a prompt")
        return Invoke(self, prompt, sampling)

    def barrier(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(BARRIER_MESSAGE)

    @property
    def result(self) -> Any:
        """After the trace: vLLM's RequestOutput of its one request (a list of them for several)."""
        outputs = [result.output for result in self.results]
        if not outputs:
            raise RuntimeError("tracer.result exists inside a block and after the trace")
        return outputs[0] if len(outputs) == 1 else outputs

    @property
    def iter(self) -> NoReturn:
        raise RuntimeError("loop over steps inside a block: in a trace with a prompt, or in an invoke")

    def all(self) -> NoReturn:
        raise RuntimeError("loop over steps inside a block: in a trace with a prompt, or in an invoke")

    def _run_body_here(self) -> dict[str, Any]:
        compiled = self._compiled()
        assert self._frame is not None
        saved = SavedHere()
        names = {
            "__builtins__": builtins,
            "__name__": self._frame.f_globals.get("__name__", "__main__"),
            **values_of(compiled.reads, self._frame),
            SAVE_NAME: saved.mark,
            NAMED_NAME: saved.mark_named,
        }
        _saving.append(saved)
        try:
            exec(compiled.code, names)
        finally:
            _saving.pop()
        return saved.collect(names)

    def _finish(self, saved: dict[str, Any]) -> None:
        runs = self._model.run_requests(self._requests)
        self.results = make_results(runs)
        assert self._frame is not None
        assign_names(self._frame, merge_saves(self.results, saved))
        raise_failures(self.results)
        report_cut_loops(runs, strict=self._strict, stacklevel=3)

    def _add(self, request: BlockRequest) -> None:
        self._requests.append(request)


class Invoke(_Capturing):
    """`with tracer.invoke(prompt, **sampling):`."""

    def __init__(self, trace: Trace, prompt: Any, sampling: dict[str, Any]) -> None:
        self._trace = trace
        self._lora_request = sampling.pop("lora_request", trace._lora_request)
        self._sampling = {**trace._sampling, **checked_sampling(sampling)}
        self._vllm_prompt = None if prompt is _NO_PROMPT else to_vllm_prompt(prompt)

    def __enter__(self) -> Trace:
        self._enter(sys._getframe(1))
        return self._trace

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        try:
            if not self._leave(error):
                return False
            if self._vllm_prompt is None:
                assert self._body is not None
                if self._body.first is not None:
                    raise ValueError("an invoke without a prompt runs no request, so its body has nothing to read")
                return True
            model = self._trace._model
            self._trace._add(
                BlockRequest(
                    prompt=self._vllm_prompt,
                    sampling=self._sampling,
                    payload=self._block(model),
                    clone_reads=model.clone_reads,
                    lora_request=self._lora_request,
                )
            )
            return True
        finally:
            self._frame = None


class SavedHere:
    """What a trace's own body saves, outside of any invoke."""

    def __init__(self) -> None:
        self._marked: dict[int, Any] = {}
        self._explicit: list[tuple[str, Any]] = []

    def holds(self, value: Any) -> bool:
        """Whether `value` is a container that was saved."""
        return not isinstance(value, ATOMS) and id(value) in self._marked

    def mark(self, value: Any) -> Any:
        self._marked[id(value)] = value
        return value

    def mark_named(self, name: str, value: Any) -> None:
        if id(value) in self._marked:
            self._explicit.append((name, value))

    def collect(self, names: dict[str, Any]) -> dict[str, Any]:
        found = {
            name: value for name, value in names.items() if not isinstance(value, ATOMS) and id(value) in self._marked
        }
        found.update({name: value for name, value in self._explicit if name in names and names[name] is value})
        return found


def save_here(value: Any) -> Any:
    """`harvest.save` in a trace's own body.

    Raises:
        RuntimeError: no trace is open.
    """
    if not _saving:
        raise RuntimeError("save() keeps a value of a block; there is no block here")
    return _saving[-1].mark(value)


def pack_block(code: BlockCode, model: VLLM) -> bytes:
    """A block as bytes for the engine.

    Raises:
        TypeError: a value that the block reads cannot be sent; the message names it.
    """
    tokenizer = model.known_tokenizer
    try:
        return pack(code, tokenizer=tokenizer).head
    except Exception as error:
        for name, value in code.names.items():
            try:
                pack(value, tokenizer=tokenizer)
            except Exception as problem:
                raise TypeError(
                    f"the block reads {name!r}, a {type(value).__name__} that cannot be sent to the engine: {problem}"
                ) from problem
        raise TypeError(f"the block cannot be sent to the engine: {error}") from error


__all__ = ["Invoke", "Trace", "pack_block", "save_here"]
