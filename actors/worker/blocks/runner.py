"""Mixins that drive a :class:`BlockRuntime` from vLLM's model runners and answer for its blocks by RPC.

Written against vLLM 0.32.0; V1 is tested on CPU, V2 needs a GPU (tests/blocks/test_gpu.py). V1
(`v1/worker/gpu_model_runner.py`) computes logits at the end of ``execute_model`` and samples in ``sample_tokens``; V2
(`v1/worker/gpu/model_runner.py`, the GPU default) does both in ``sample``. Which requests' blocks have ended travels to
the scheduler as an attribute of ``ModelRunnerOutput``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from actors.worker.blocks.graph_recording import CudaRecorder
from actors.worker.blocks.layer_graphs import LayerGraphs
from actors.worker.blocks.runtime import BlockRuntime
from actors.worker.blocks.wire import EXTRA_ARGS_KEY
from actors.worker.step import StepRows

if TYPE_CHECKING:
    from actors.worker.blocks.graph_recording import Recorder
    from actors.worker.blocks.wire import BlockOutcome

ENDED_ATTRIBUTE = "harvest_ended_requests"
"""Attribute of ModelRunnerOutput: ids of requests to end after this step."""


def make_recorder(device: Any) -> Recorder | None:
    """What records layers on this device, None where nothing does."""
    device = torch.device(device)
    return CudaRecorder(device) if device.type == "cuda" else None


class _BlocksMixin:
    """What both runners share."""

    blocks: BlockRuntime | None = None
    vllm_config: Any
    device: Any

    def install_blocks(self, *, block_time_limit_s: float | None, layer_graphs: bool) -> None:
        """Call once the model is loaded.

        Args:
            block_time_limit_s: the longest that a block may run between two locations; None for no limit.
            layer_graphs: launch layers in which no block waits from recordings, where that is possible.
        """
        model = self.get_model()  # type: ignore[attr-defined]
        tp_size = self.vllm_config.parallel_config.tensor_parallel_size
        layouts = None
        if tp_size > 1:
            from actors.worker.blocks.tp_layout import Layouts

            layouts = Layouts(model, self.vllm_config, tp_size)
        self.blocks = BlockRuntime(
            model,
            device=torch.device(self.device),
            tp_size=tp_size,
            layouts=layouts,
            make_tokenizer=self._make_tokenizer,
            block_time_limit_s=block_time_limit_s,
            graphs=LayerGraphs(
                make_recorder(self.device) if layer_graphs and self._is_plain() else None,
                self.vllm_config.compilation_config.static_forward_context.values(),
            ),
        )

    def _is_plain(self) -> bool:
        """A layer's work depends on its rows alone: no collectives, no state of adapters, no scale over all rows."""
        config = self.vllm_config
        return (
            config.parallel_config.world_size == 1
            and config.lora_config is None
            and config.model_config.quantization is None
        )

    def _make_tokenizer(self) -> Any:
        from vllm.tokenizers import cached_tokenizer_from_config

        return cached_tokenizer_from_config(self.vllm_config.model_config)

    def _take_on_requests(self, scheduler_output: Any) -> None:
        if self.blocks is None:
            return
        if scheduler_output.finished_req_ids and self.blocks.n_tasks:
            self.blocks.drop(scheduler_output.finished_req_ids)
        for request in scheduler_output.scheduled_new_reqs:
            params = request.sampling_params
            if params is not None and params.extra_args and EXTRA_ARGS_KEY in params.extra_args:
                self.blocks.add_request(request.req_id, params.extra_args[EXTRA_ARGS_KEY])

    def _name_ended(self, output: Any) -> Any:
        if self.blocks is not None and self.blocks.ended_requests and output is not None:
            # An output still on its way from the device holds the one that the scheduler will get.
            setattr(getattr(output, "model_runner_output", output), ENDED_ATTRIBUTE, self.blocks.take_ended())
        return output


class BlocksV1Mixin(_BlocksMixin):
    """For subclasses of vLLM's V1 runner; put it before the runner in the bases."""

    _block_rows: StepRows | None = None

    def _update_states(self, scheduler_output: Any) -> Any:
        self._take_on_requests(scheduler_output)
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        if self.blocks is not None:
            batch = self.input_batch  # type: ignore[attr-defined]
            n_requests = batch.num_reqs
            starts = np.zeros(n_requests + 1, np.int64)
            np.cumsum(num_scheduled_tokens[:n_requests], out=starts[1:])
            self._block_rows = StepRows.checked(
                request_ids=tuple(batch.req_ids[:n_requests]),
                starts=starts,
                first_positions=batch.num_computed_tokens_cpu[:n_requests],
                scheduled=scheduler_output.num_scheduled_tokens,
            )
        return prepared

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        blocks = self.blocks
        if blocks is None:
            return super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        rows, self._block_rows = self._block_rows, None
        positions = kwargs.get("positions")
        blocks.begin_step(rows, n_padded_rows=None if positions is None else positions.shape[-1])
        output = super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        blocks.end_forward()
        return output

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        blocks = self.blocks
        if blocks is None or not blocks.active or logits is None:
            return super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        blocks.serve_logits(logits)
        output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        blocks.serve_samples(output.sampled_token_ids)
        blocks.end_step()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self._name_ended(super().sample_tokens(grammar_output))  # type: ignore[misc]


class BlocksV2Mixin(_BlocksMixin):
    """For subclasses of vLLM's V2 runner; put it before the runner in the bases."""

    def add_requests(self, scheduler_output: Any) -> None:
        self._take_on_requests(scheduler_output)
        super().add_requests(scheduler_output)  # type: ignore[misc]

    def prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        batch = super().prepare_inputs(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self.blocks is not None:
            self.blocks.begin_step(
                StepRows.checked(
                    request_ids=tuple(batch.req_ids),
                    starts=batch.query_start_loc_np[: batch.num_reqs + 1],
                    first_positions=batch.num_computed_tokens_np[: batch.num_reqs],
                    scheduled=scheduler_output.num_scheduled_tokens,
                ),
                n_padded_rows=batch.num_tokens_after_padding,
            )
        return batch

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        blocks = self.blocks
        if blocks is not None:
            blocks.end_forward()
        if blocks is None or not blocks.active:
            return super().sample(*args, **kwargs)  # type: ignore[misc]
        model: Any = self.get_model()  # type: ignore[attr-defined]
        compute_logits = model.compute_logits

        def compute_and_serve(*args: Any, **kwargs: Any) -> Any:
            logits = compute_logits(*args, **kwargs)
            blocks.serve_logits(logits)
            return logits

        model.compute_logits = compute_and_serve
        try:
            sampled = super().sample(*args, **kwargs)  # type: ignore[misc]
        finally:
            del model.compute_logits
        blocks.serve_samples(sampled[0].sampled_token_ids)
        blocks.end_step()
        return sampled

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self._name_ended(super().sample_tokens(grammar_output))  # type: ignore[misc]


CONFIG_KEY = "harvest_blocks"
"""Where the options of blocks are in vLLM's `additional_config`."""


class BlockWorkerMixin:
    """Put before a vLLM worker class: its runner drives blocks, and it answers for them by RPC."""

    model_runner: Any
    rank: int
    vllm_config: Any

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        runner = self.model_runner
        mixin = BlocksV2Mixin if hasattr(runner, "prepare_inputs") else BlocksV1Mixin
        kind = type(runner)
        runner.__class__ = type(f"Block{kind.__name__}", (mixin, kind), {})

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        config = self.vllm_config.additional_config
        # A dict in a block engine; another worker that is stacked on this one may have an object there.
        options = config.get(CONFIG_KEY, {}) if isinstance(config, Mapping) else getattr(config, CONFIG_KEY, None) or {}
        self.model_runner.install_blocks(
            block_time_limit_s=options.get("block_time_limit_s"), layer_graphs=options.get("layer_graphs", False)
        )

    def shutdown(self) -> None:
        blocks: BlockRuntime | None = getattr(self.model_runner, "blocks", None)
        if blocks is not None:
            blocks.close()
        super().shutdown()  # type: ignore[misc]

    def finish_blocks(
        self, finished: list[tuple[str, Any]], limit_bytes: int, keep_buffers: bool
    ) -> list[tuple[str, list[Any]]] | None:
        """End the blocks of finished requests; (key, outcomes as parcels or failures) from rank 0, None elsewhere."""
        from actors.worker.blocks.returns import pack_outcome

        blocks: BlockRuntime = self.model_runner.blocks
        results: list[tuple[str, list[Any]]] = []
        for key, output in finished:
            outcomes: list[BlockOutcome] = blocks.finish(key, output)
            if self.rank == 0:
                results.append(
                    (
                        key,
                        [
                            pack_outcome(outcome, limit_bytes=limit_bytes, keep_buffers=keep_buffers)
                            for outcome in outcomes
                        ],
                    )
                )
        return results if self.rank == 0 else None

    def count_blocks(self) -> int:
        """Blocks that this rank still holds."""
        blocks: BlockRuntime = self.model_runner.blocks
        return blocks.n_tasks
