"""Llm: the vLLM engine of one actor, as little of it as a harvest needs.

Refuses vLLM features under which rows could not be attributed, or would not all be computed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from actors.lora import Adapter, AdapterError, read_adapter
from actors.protocol import EngineSpec
from actors.step_size import step_arguments
from actors.worker import self_test

# Argument -> why it is refused when it is set to something that is true.
_REFUSED_ARGUMENTS = {
    "enable_prefix_caching": "cached tokens pass through no forward, so they have no rows",
    "speculative_config": "draft tokens may be rejected after their rows were computed",
    "enable_dbo": "dual batch overlap runs a pass in two halves",
    "kv_sharing_fast_prefill": "later layers run for sampled rows only",
    "prefill_context_parallel_size": "prefill context parallelism gives each rank other rows",
    "enable_prompt_embeds": "prompt embeddings have no token ids",
}
# Arguments that Harvest sets itself, with the configuration key that holds them.
_OWN_ARGUMENTS = {
    "model": "model.name",
    "tokenizer": "model.tokenizer",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "max_model_len": "model.max_length",
    "trust_remote_code": "model.trust_remote_code",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "enable_lora": "model.lora",
    "generation_config": "capture.generation",
    "override_generation_config": "capture.generation",
    "worker_cls": "",
    "additional_config": "",
}


class EngineArgumentError(ValueError):
    """A vLLM argument that a harvest cannot use."""


def check_engine_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse engine arguments under which rows would be wrong; needs no vLLM.

    Raises:
        EngineArgumentError: names the argument and the reason.
    """
    for name, reason in _REFUSED_ARGUMENTS.items():
        value = arguments.get(name)
        if (value and value != 1) or value is True:
            raise EngineArgumentError(f"engine.vllm.{name} = {value!r} cannot be used in a harvest: {reason}")
    for name, key in _OWN_ARGUMENTS.items():
        if name in arguments:
            where = f"set {key} instead" if key else "Harvest sets it itself"
            raise EngineArgumentError(f"engine.vllm.{name}: {where}")
    compilation = arguments.get("compilation_config")
    passes = compilation.get("pass_config") if isinstance(compilation, Mapping) else None
    if isinstance(passes, Mapping) and passes.get("enable_sp"):
        raise EngineArgumentError(
            "engine.vllm.compilation_config.pass_config.enable_sp: sequence parallelism gives each rank other rows"
        )
    if arguments.get("pipeline_parallel_size", 1) != 1:
        raise EngineArgumentError("engine.vllm.pipeline_parallel_size: pipeline parallelism is not supported")
    if arguments.get("data_parallel_size", 1) != 1:
        raise EngineArgumentError("engine.vllm.data_parallel_size: use engine.count; each engine is independent")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One invoke on its way into the engine."""

    request_id: str
    token_ids: list[int]
    max_tokens: int
    harvest: dict[str, Any]
    """unit, attempt, invoke, unit_row, n_prompt, spans: what the worker needs to place the rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A request that has ended."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[float, ...] | None = None
    """Log-probability of each generated token, where sampling asks for them."""


def engine_arguments(spec: EngineSpec, *, on_cpu: bool, adapter: Adapter | None = None) -> dict[str, Any]:
    """The arguments of `vllm.EngineArgs` for a spec, whose adapter has been read."""
    check_engine_arguments(spec.vllm)
    whole_prompts = _whole_prompts(spec) if on_cpu else {}
    defaults: dict[str, Any] = {
        **({} if adapter is None else adapter.engine_arguments()),
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        # Token ids go in and rows come out; text is needed to find the end of a generated answer only.
        "skip_tokenizer_init": not spec.generates,
        **whole_prompts,
        **step_arguments(
            {**spec.vllm, **whole_prompts},
            on_cpu=on_cpu,
            generates=spec.generates,
            row_bytes=spec.row_bytes,
            ring_bytes=spec.ring_bytes,
            prompt_tokens=spec.prompt_tokens,
            max_model_len=spec.max_model_len,
        ),
    }
    if spec.tensor_parallel_size > 1:
        # Inside a placement group vLLM would choose Ray; ranks of one node are children of the actor.
        defaults["distributed_executor_backend"] = "mp"
    if on_cpu:
        defaults["enforce_eager"] = True
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            defaults["kv_cache_memory_bytes"] = 1 << 30
    dtype = spec.dtype
    if dtype == "auto" and on_cpu:
        dtype = "float32"
    return {
        **defaults,
        **spec.vllm,
        "model": spec.model,
        "tokenizer": spec.tokenizer,
        "revision": spec.revision,
        "dtype": dtype,
        "max_model_len": spec.max_model_len,
        "trust_remote_code": spec.trust_remote_code,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "worker_cls": f"actors.worker.worker_{'cpu.HarvestCPUWorker' if on_cpu else 'gpu.HarvestGPUWorker'}",
        "additional_config": spec,
    }


def _whole_prompts(spec: EngineSpec) -> dict[str, Any]:
    """Arguments for a CPU, where vLLM's engine breaks when a prompt with a seed of its own is cut into pieces."""
    if spec.sampling.get("seed") is None or not spec.generates:
        return {}
    if spec.vllm.get("enable_chunked_prefill"):
        raise EngineArgumentError(
            "engine.vllm.enable_chunked_prefill = true: vLLM's CPU engine breaks when it cuts a prompt whose answer is "
            "drawn with a seed; leave it out, or leave out capture.generation.seed"
        )
    return {"enable_chunked_prefill": False}


def _lora_request(adapter: Adapter | None) -> Any:
    """What each request carries, so that vLLM applies the run's adapter to it; None without one."""
    if adapter is None:
        return None
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.request import LoRARequest

    from actors.worker.lora import ADAPTER_ID

    patterns = [name for name in ("rank_pattern", "alpha_pattern") if adapter.config.get(name)]
    if patterns and not hasattr(PEFTHelper, "get_rank_and_scaling"):
        ignored = " and ".join(patterns)
        raise AdapterError(f"{adapter.name}: this version of vLLM passes over {ignored}; use a newer one")
    return LoRARequest("harvest", ADAPTER_ID, str(adapter.folder))


class Llm:
    """A vLLM engine with our workers. Build it in the process that owns the devices; it imports vLLM."""

    def __init__(self, spec: EngineSpec) -> None:
        # The engine core runs here, with its ranks as children: one process fewer between the feeder and the taps.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        self._spec = spec
        self._parameters: dict[int, Any] = {}
        adapter = None if spec.lora is None else read_adapter(spec.lora)
        self._lora = _lora_request(adapter)
        arguments = engine_arguments(spec, on_cpu=current_platform.is_cpu(), adapter=adapter)
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        scheduler = self._engine.vllm_config.scheduler_config
        self.max_requests: int = scheduler.max_num_seqs
        self.max_step_tokens: int = scheduler.max_num_batched_tokens
        try:
            self._test_taps()
            if self._lora is not None:
                self._test_adapter()
        except BaseException:
            self.close()
            raise
        self.compute_dtype = str(self._engine.model_config.dtype).removeprefix("torch.")

    def _test_taps(self) -> None:
        for harvest, ids in zip(self_test.requests_of(len(self_test.PROMPTS[0])), self_test.PROMPTS, strict=True):
            self.add(
                Request(request_id=f"self-test.{harvest['invoke']}", token_ids=list(ids), max_tokens=1, harvest=harvest)
            )
            while self.busy:
                self.step()
        problems = [problem for rank in self.call("harvest_end_self_test") for problem in rank]
        if problems:
            import vllm

            raise self_test.SelfTestError(self_test.explain(problems, vllm.__version__))

    def _test_adapter(self) -> None:
        unapplied = self.call("harvest_unapplied_weights")[0]
        if unapplied:
            raise AdapterError(
                f"model.lora = {self._spec.lora} does not fit the model, which has no place for its weights of "
                f"{', '.join(unapplied)}; they would be passed over"
            )

    def add(self, request: Request) -> None:
        """Queue a request."""
        from vllm import TokensPrompt

        # Checking the same settings for each request would cost as much as a short prompt's pass.
        shared = self._parameters.get(request.max_tokens)
        if shared is None:
            shared = self._parameters[request.max_tokens] = self._make_parameters(request.max_tokens)
        parameters = copy(shared)
        parameters.extra_args = {"harvest": request.harvest}
        seed = self._spec.sampling.get("seed")
        if seed is not None:
            parameters.seed = (seed + request.harvest["invoke"]) & 0x7FFF_FFFF
        prompt = TokensPrompt(prompt_token_ids=request.token_ids)
        self._engine.add_request(request.request_id, prompt, parameters, lora_request=self._lora)

    def _make_parameters(self, max_tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # The self-test asks for one token, whatever the run's answers.
        least = min(self._spec.sampling.get("min_tokens", 0), max_tokens)
        return SamplingParams(
            **{**self._spec.sampling, "min_tokens": least},
            max_tokens=max_tokens,
            detokenize=bool(self._spec.sampling.get("stop")),
            output_kind=RequestOutputKind.FINAL_ONLY,
            # Each request gets a copy of its own here; vLLM would make a deep one, at half of the cost of adding it.
            skip_clone=True,
        )

    def step(self) -> list[Finished]:
        """One engine step; the requests that ended in it."""
        return [
            Finished(
                request_id=output.request_id,
                token_ids=tuple(output.outputs[0].token_ids),
                finish_reason=output.outputs[0].finish_reason,
                logprobs=_logprobs(output.outputs[0]),
            )
            for output in self._engine.step()
            if output.finished
        ]

    @property
    def busy(self) -> bool:
        """True while requests are unfinished."""
        return bool(self._engine.has_unfinished_requests())

    def abort(self, request_ids: list[str]) -> None:
        """End requests early."""
        self._engine.abort_request(request_ids)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a worker method by name on every rank."""
        results: list[Any] = self._engine.collective_rpc(method, args=arguments)
        return results

    def close(self) -> None:
        """Shut the engine and its ranks down."""
        self._engine.engine_core.shutdown()


def _logprobs(output: Any) -> tuple[float, ...] | None:
    if output.logprobs is None:
        return None
    return tuple(each[token].logprob for token, each in zip(output.token_ids, output.logprobs, strict=True))
