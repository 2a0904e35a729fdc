"""BlockEngine: owns a vLLM engine whose requests may carry blocks.

TP=1 runs in this process; TP>1 has vLLM's worker processes, with the scheduler still here. Engines that serve blocks
run without chunked prefill, prefix caching or asynchronous scheduling: a block sees its prompt whole, and each step
once. vLLM runs eager, so that Python runs at every module where a block may wait; `enforce_eager` decides whether the
layers in which none waits are launched as CUDA graphs (see layer_graphs).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.worker.blocks.returns import unpack_outcome
from actors.worker.blocks.wire import EXTRA_ARGS_KEY, BlockOutcome

FORCED_ARGS: dict[str, Any] = {
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "async_scheduling": False,
}
"""Engine arguments that blocks depend on; another value is refused."""

REFUSED_ARGS: dict[str, str] = {
    "speculative_config": "speculative decoding makes several rows per step, some of which are taken back",
    "worker_cls": "blocks need Harvest's own worker",
    "scheduler_cls": "blocks need Harvest's own scheduler",
}


class EngineLostError(RuntimeError):
    """The engine died or had to be given up; the next request starts a new one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRequest:
    """One prompt and, when `payload` is set, the block that runs with it."""

    prompt: Any
    """What vLLM takes: a string, or a dict with prompt_token_ids."""
    sampling: dict[str, Any]
    """Arguments of vLLM's SamplingParams."""
    payload: bytes | None = None
    clone_reads: bool = False
    lora_request: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRun:
    """What became of one request."""

    output: Any
    """vLLM's RequestOutput."""
    outcomes: list[BlockOutcome] = field(default_factory=list)
    """One per sequence (`n`); empty without a block."""


class BlockEngine:
    """See the module.

    Args:
        model: a local folder or a Hugging Face id.
        engine_args: vLLM's engine arguments; see `FORCED_ARGS` and `REFUSED_ARGS`.
        max_saved_bytes: the most tensor bytes that one request's block may send back.
        block_time_limit_s: the longest that a block may run between two locations; None for no limit.

    Raises:
        ValueError: an argument contradicts what blocks need.
    """

    def __init__(
        self,
        model: str,
        engine_args: dict[str, Any],
        *,
        max_saved_bytes: int,
        block_time_limit_s: float | None,
    ) -> None:
        check_engine_args(engine_args)
        self.max_saved_bytes = max_saved_bytes
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._lost = False
        with _in_process():
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            from actors.worker.blocks.runner import CONFIG_KEY

            additional = dict(engine_args.get("additional_config") or {})
            additional[CONFIG_KEY] = {
                "block_time_limit_s": block_time_limit_s,
                "layer_graphs": not engine_args.get("enforce_eager"),
            }
            args = {
                "disable_log_stats": True,
                **engine_args,
                **FORCED_ARGS,
                # Python runs at every module; what may be launched as graphs is decided layer by layer.
                "enforce_eager": True,
                "worker_cls": worker_class(),
                "scheduler_cls": "actors.worker.blocks.scheduler.BlockScheduler",
                "additional_config": additional,
            }
            if int(args.get("tensor_parallel_size", 1)) > 1:
                args.setdefault("distributed_executor_backend", "mp")
            self._engine = LLMEngine.from_engine_args(EngineArgs(model=model, **args))
        self._keep_buffers = self._engine.vllm_config.parallel_config.world_size == 1

    @property
    def vllm_config(self) -> Any:
        return self._engine.vllm_config

    @property
    def lost(self) -> bool:
        return self._lost

    @property
    def tokenizer(self) -> Any:
        return self._engine.get_tokenizer()

    def module_tree(self) -> Any:
        """The real model of a TP=1 engine; None when it lives in other processes."""
        if not self._keep_buffers:
            return None
        return self._engine.model_executor.driver_worker.worker.model_runner.get_model()

    def run(self, requests: Sequence[BlockRequest]) -> list[BlockRun]:
        """Run all requests to their end, batched as vLLM sees fit; results in the order of `requests`.

        Raises:
            ValueError: vLLM refuses a request; none of them is run.
            EngineLostError: the engine broke down.
        """
        with self._lock:
            if self._lost:
                raise EngineLostError("the engine is gone; build a new one")
            keys = self._add(requests)
            try:
                return self._drive(keys)
            except Exception as error:
                self._give_up()
                raise EngineLostError(f"the engine broke down and was given up: {error}") from error
            except BaseException:
                # Interrupted in the middle of a step: vLLM's runner cannot go on from there.
                self._give_up()
                raise

    def count_blocks(self) -> list[int]:
        """Blocks that each rank still holds; all zero between runs."""
        counts: list[int] = self._engine.collective_rpc("count_blocks")
        return counts

    def close(self) -> None:
        """Shut the engine down and free what it held."""
        if not self._lost:
            self._give_up()

    # -- inside -------------------------------------------------------------------------------------------------

    def _add(self, requests: Sequence[BlockRequest]) -> list[str]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        keys: list[str] = []
        internal: list[str] = []
        try:
            for request in requests:
                key = f"harvest-{next(self._numbers)}"
                extra = dict(request.sampling.get("extra_args") or {})
                if request.payload is not None:
                    extra[EXTRA_ARGS_KEY] = {
                        "key": key,
                        "payload": request.payload,
                        "clone_reads": request.clone_reads,
                    }
                params = SamplingParams(**{**request.sampling, "extra_args": extra or None})
                params.output_kind = RequestOutputKind.FINAL_ONLY
                internal.append(
                    self._engine.add_request(key, request.prompt, params, lora_request=request.lora_request)
                )
                keys.append(key)
        except Exception:
            self._engine.abort_request(internal, internal=True)
            raise
        return [key if request.payload is not None else f"-{key}" for key, request in zip(keys, requests, strict=True)]

    def _drive(self, keys: list[str]) -> list[BlockRun]:
        with_block = {key for key in keys if not key.startswith("-")}
        runs: dict[str, BlockRun] = {}
        while self._engine.has_unfinished_requests():
            finished = []
            for output in self._engine.step():
                if not output.finished:
                    continue
                if output.request_id in with_block:
                    finished.append((output.request_id, output))
                else:
                    runs[f"-{output.request_id}"] = BlockRun(output=output)
            if finished:
                replies = self._engine.collective_rpc(
                    "finish_blocks", args=(finished, self.max_saved_bytes, self._keep_buffers)
                )
                for (key, parcels), (_, output) in zip(replies[0], finished, strict=True):
                    outcomes = [unpack_outcome(parcel) for parcel in parcels]
                    runs[key] = BlockRun(output=output, outcomes=outcomes)
        return [runs[key] for key in keys]

    def _give_up(self) -> None:
        self._lost = True
        engine, self._engine = self._engine, None
        with contextlib.suppress(Exception):
            engine.engine_core.shutdown()


def check_engine_args(engine_args: dict[str, Any]) -> None:
    """Refuse arguments under which blocks cannot be served.

    Raises:
        ValueError: names the argument and the reason.
    """
    for name, value in FORCED_ARGS.items():
        given = engine_args.get(name)
        if given is not None and given is not value:
            raise ValueError(f"{name}={given!r}: engines that serve blocks run with {name}={value!r}; leave it out")
    for name, reason in REFUSED_ARGS.items():
        if engine_args.get(name):
            raise ValueError(f"{name} cannot be used with blocks: {reason}")
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if int(engine_args.get(name) or 1) > 1:
            raise ValueError(
                f"{name}={engine_args[name]}: blocks run on one pipeline stage and one replica; leave it 1"
            )


def worker_class() -> str:
    """The dotted name of the worker for this machine's platform."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "actors.worker.blocks.cpu_worker.BlockCPUWorker"
    return "actors.worker.blocks.gpu_worker.BlockGPUWorker"


@contextlib.contextmanager
def _in_process() -> Iterator[None]:
    """VLLM's engine core in this process, for as long as the engine is being built."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
