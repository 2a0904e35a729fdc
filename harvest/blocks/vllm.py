"""VLLM: a model whose locations blocks read and write.

    model = VLLM("Qwen/Qwen3-8B")                  # the module tree only; no device, no weights
    model = VLLM("Qwen/Qwen3-8B", dispatch=True)   # with an engine

See docs/blocks.md for the block language.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from actors.worker.blocks.engine import BlockEngine, BlockRequest, BlockRun, EngineLostError, check_engine_args
from actors.worker.blocks.wire import BlockCode, Reference
from harvest.blocks.errors import EngineReplacedError
from harvest.blocks.prompts import to_vllm_prompt
from harvest.blocks.refs import ModuleProxy
from harvest.blocks.results import BlockResult, make_results, raise_failures, report_cut_loops
from harvest.blocks.sampling import checked_sampling
from harvest.blocks.trace import _NO_PROMPT, Trace, pack_block

if TYPE_CHECKING:
    from actors.worker.blocks.remote import RemoteBlockEngine

_FALSE = ("", "0", "false", "no", "off")


class VLLM(ModuleProxy):
    """A model on vLLM.

    Args:
        model: a local folder, a name that `harvest models` lists, or a Hugging Face id.
        dispatch: build the engine now; otherwise the first trace, generate or run does.
        clone_reads: every read is a copy whose in-place edits stay in it; assign the edited value back. None takes
            the environment's HARVEST_CLONE_READS (or NNSIGHT_VLLM_CLONE_READS).
        strict: a loop cut short by the end of its request is an error; a trace's own `strict` wins.
        max_saved_bytes: the most bytes of tensors that one request's block may send back.
        block_time_limit_s: the longest that a block may run between two locations; None for no limit.
        ray: put the engine in a Ray actor; a dict gives the actor's options.
        engine_args: vLLM's engine arguments.

    Raises:
        ValueError: an engine argument contradicts what blocks need.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dispatch: bool = False,
        clone_reads: bool | None = None,
        strict: bool = False,
        max_saved_bytes: int = 4 << 30,
        block_time_limit_s: float | None = 60.0,
        ray: bool | Mapping[str, Any] = False,
        **engine_args: Any,
    ) -> None:
        super().__init__("", self._find_tree)
        check_engine_args(engine_args)
        self.__dict__.update(
            _name=os.fspath(model),
            _engine_args=engine_args,
            _engine=None,
            _tree=None,
            _tokenizer=None,
            clone_reads=_clone_reads_from_environment() if clone_reads is None else clone_reads,
            strict=strict,
            max_saved_bytes=max_saved_bytes,
            block_time_limit_s=block_time_limit_s,
            _ray=ray,
        )
        if dispatch:
            self.dispatch()

    _name: str
    _engine_args: dict[str, Any]
    _engine: BlockEngine | RemoteBlockEngine | None
    _tree: Any
    _tokenizer: Any
    _ray: bool | Mapping[str, Any]
    clone_reads: bool
    strict: bool
    max_saved_bytes: int
    block_time_limit_s: float | None

    def wire_reference(self) -> Reference:
        return ("model", "")

    # -- the engine ---------------------------------------------------------------------------------------------

    @property
    def dispatched(self) -> bool:
        """Whether the engine is there."""
        return self._engine is not None

    def dispatch(self) -> VLLM:
        """Build the engine, unless it is there."""
        self._engine_now()
        return self

    def close(self) -> None:
        """Shut the engine down; the next trace would build a new one."""
        engine = self._engine
        self.__dict__["_engine"] = None
        if engine is not None:
            engine.close()

    def __enter__(self) -> VLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Inside a block it is the engine's own."""
        if self._tokenizer is None:
            self.__dict__["_tokenizer"] = self._engine_now().tokenizer
        return self._tokenizer

    @property
    def known_tokenizer(self) -> Any:
        """The tokenizer if it was asked for, which is the only way that a block can hold it."""
        return self._tokenizer

    @property
    def engine(self) -> BlockEngine | RemoteBlockEngine:
        """The engine, built if need be."""
        return self._engine_now()

    def run_requests(self, requests: Sequence[BlockRequest]) -> list[BlockRun]:
        """Run requests on the engine.

        Raises:
            EngineReplacedError: the engine broke down.
        """
        if not requests:
            return []
        engine = self._engine_now()
        try:
            return engine.run(requests)
        except EngineLostError as error:
            raise EngineReplacedError(f"{error}. The next trace starts a new engine.") from error.__cause__
        finally:
            if engine.lost:
                self.close()

    # -- running things -----------------------------------------------------------------------------------------

    def trace(self, prompt: Any = _NO_PROMPT, **options: Any) -> Trace:
        """`with model.trace(prompt, **sampling) as tracer:` runs its body as a block with this prompt.

        Without a prompt, open `tracer.invoke(prompt)` contexts inside. `strict` and `lora_request` may be given
        beside the sampling arguments.

        Raises:
            ValueError: more than one prompt.
            TypeError: an unknown argument or form of prompt.
        """
        return Trace(self, prompt, options)

    def generate(self, prompts: Any = _NO_PROMPT, **options: Any) -> Any:
        """Without `with`: run the engine on one prompt or a list of them and return vLLM's RequestOutputs.

        With `with`, this is `trace`.
        """
        if _is_entered_by_with(sys._getframe(1)):
            return self.trace(prompts, **options)
        lora_request = options.pop("lora_request", None)
        sampling = checked_sampling(options)
        requests = [
            BlockRequest(prompt=to_vllm_prompt(prompt), sampling=sampling, lora_request=lora_request)
            for prompt in _several(prompts)
        ]
        return [run.output for run in self.run_requests(requests)]

    def run(
        self,
        function: Callable[..., Any],
        prompts: Any,
        *,
        strict: bool | None = None,
        errors: str = "raise",
        **options: Any,
    ) -> Any:
        """Run a plain function as the block of each prompt; needs no source.

        Args:
            function: takes (model) or (model, tracer); keeps values by returning them or by `harvest.save(value)`.
            prompts: one prompt, or a list of them.
            strict: as in `VLLM`.
            errors: "raise" raises the first block's error once all have ended; "return" leaves errors in the results.
            options: sampling arguments, and `lora_request`.

        Returns:
            A BlockResult for one prompt, a list of them for a list.

        Raises:
            BlockError: a block failed.
        """
        if errors not in ("raise", "return"):
            raise ValueError(f"errors is 'raise' or 'return', not {errors!r}")
        n_wanted = len(inspect.signature(function).parameters)
        if not 1 <= n_wanted <= 2:
            raise TypeError(f"the block function takes (model) or (model, tracer), not {n_wanted} arguments")
        lora_request = options.pop("lora_request", None)
        sampling = checked_sampling(options)
        code = getattr(function, "__code__", None)
        block = BlockCode(
            code=None,
            function=function,
            names={},
            filename=code.co_filename if code is not None else "",
            source=_source_of(function),
        )
        payload = pack_block(block, self)
        requests = [
            BlockRequest(
                prompt=to_vllm_prompt(prompt),
                sampling=sampling,
                payload=payload,
                clone_reads=self.clone_reads,
                lora_request=lora_request,
            )
            for prompt in _several(prompts)
        ]
        runs = self.run_requests(requests)
        results = make_results(runs)
        if errors == "raise":
            raise_failures(results)
        report_cut_loops(runs, strict=self.strict if strict is None else strict, stacklevel=2)
        single = not isinstance(prompts, (list, tuple)) or _is_ids(prompts)
        found: BlockResult | list[BlockResult] = results[0] if single else results
        return found

    # -- inside -------------------------------------------------------------------------------------------------

    @property
    def logits(self) -> Any:
        self._outside("logits")

    @property
    def samples(self) -> Any:
        self._outside("samples")

    def _engine_now(self) -> BlockEngine | RemoteBlockEngine:
        if self._engine is None:
            from harvest.models import resolve_model

            settings: dict[str, Any] = {
                "max_saved_bytes": self.max_saved_bytes,
                "block_time_limit_s": self.block_time_limit_s,
            }
            # Dummy weights come from vLLM itself.
            needs_weights = self._engine_args.get("load_format") != "dummy"
            name = resolve_model(self._name, needs_weights=needs_weights)
            if self._ray is False:
                self.__dict__["_engine"] = BlockEngine(name, self._engine_args, **settings)
            else:
                from actors.worker.blocks.remote import RemoteBlockEngine

                options = {} if self._ray is True else dict(self._ray)
                self.__dict__["_engine"] = RemoteBlockEngine(name, self._engine_args, ray_options=options, **settings)
        engine = self._engine
        assert engine is not None
        return engine

    def _find_tree(self) -> Any:
        if self._tree is None:
            tree = self._engine.module_tree() if self._engine is not None else None
            if tree is not None:
                return tree
            from actors.worker.tree import build_model_tree
            from harvest.models import resolve_model

            # A folder with nothing but config.json is enough for the tree.
            name = self._name if os.path.isdir(self._name) else resolve_model(self._name)
            self.__dict__["_tree"] = build_model_tree(name, **self._engine_args)
        return self._tree


def _clone_reads_from_environment() -> bool:
    value = os.environ.get("HARVEST_CLONE_READS", os.environ.get("NNSIGHT_VLLM_CLONE_READS", ""))
    return value.strip().lower() not in _FALSE


def _several(prompts: Any) -> list[Any]:
    if prompts is _NO_PROMPT:
        raise TypeError("give a prompt or a list of prompts")
    if isinstance(prompts, (list, tuple)) and not _is_ids(prompts):
        return list(prompts)
    return [prompts]


def _is_ids(prompts: Any) -> bool:
    return isinstance(prompts, (list, tuple)) and bool(prompts) and all(type(item) is int for item in prompts)


def _source_of(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _is_entered_by_with(frame: FrameType) -> bool:
    """Whether the call that `frame` is making is the expression of a `with` statement."""
    import dis

    code = frame.f_code
    following = [
        instruction.opname
        for instruction in dis.get_instructions(code)
        if frame.f_lasti < instruction.offset <= frame.f_lasti + 64 and instruction.opname != "CACHE"
    ][:4]
    # Up to 3.13 an instruction of its own; from 3.14 on the two methods are loaded one after the other.
    return following[:1] == ["BEFORE_WITH"] or (following[:1] == ["COPY"] and "LOAD_SPECIAL" in following[:2])
