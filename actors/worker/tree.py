"""vLLM's own module tree of a model, built without weights, without a device and without process groups.

The tree is what vLLM itself constructs from ``config.json``: same classes, same paths, same ``repr``. Every
parameter lives on torch's meta device, so a 70B model costs a second and a few megabytes.

vLLM's layers ask global state for their place among the ranks. :func:`parallel_groups` puts stand-ins there for
as long as a tree is built or run and puts back what was there before, so a process may build trees before,
between and while it owns a real engine. Nothing is registered with ``torch.distributed``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from actors.worker import host_platform  # noqa: F401, before any other module of vLLM is imported

# isort: split
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.model_executor.models.transformers.base import Base as TransformersBase
from vllm.utils.torch_utils import set_default_torch_dtype

# Arguments that say where and how an engine runs; they change no module of a TP=1 tree.
_PLACEMENT_ARGS = frozenset(
    {
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "data_parallel_size_local",
        "distributed_executor_backend",
        "worker_cls",
        "worker_extension_cls",
        "additional_config",
        "compilation_config",
        "enforce_eager",
        "load_format",
    }
)

_WORLD_GROUPS = ("_WORLD", "_TP", "_ETP", "_DCP", "_PP", "_DP", "_EP", "_EPLB", "_PCP")
_SHARDED_GROUPS = frozenset({"_WORLD", "_TP", "_EP", "_EPLB"})


class _Peers:
    """Answers what layers ask of a process group: its size and this process's place in it."""

    def __init__(self, world_size: int, rank: int) -> None:
        self._world_size = world_size
        self._rank = rank

    def size(self) -> int:
        return self._world_size

    def rank(self) -> int:
        return self._rank


class _StandInGroup(parallel_state.GroupCoordinator):
    """One rank of a group that has no peers: collectives have the right shapes and send nothing."""

    def __init__(self, *, name: str, world_size: int, rank: int) -> None:
        # The base initialiser would open process groups, which is what this class exists to avoid.
        self.unique_name = f"harvest-tree-{name}"
        self.rank = rank
        self.local_rank = rank
        self.rank_in_group = rank
        self.world_size = world_size
        self.ranks = list(range(world_size))
        self.group_ranks = [self.ranks]
        self.device = torch.device("meta")
        self.device_index = rank
        self.cpu_group = self.device_group = _Peers(world_size, rank)
        self.use_device_communicator = False
        self.device_communicator = None
        self.mq_broadcaster = None
        self.use_custom_op_call = False
        self.use_cpu_custom_send_recv = False

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([input_] * self.world_size, dim=dim)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return input_.chunk(self.world_size, dim=dim)[self.rank_in_group]

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        return self.all_gather(input_, dim)

    def barrier(self) -> None:
        return None

    def destroy(self) -> None:
        return None


@contextlib.contextmanager
def parallel_groups(tp_size: int = 1, rank: int = 0) -> Iterator[None]:
    """Make this process look like ``rank`` of a ``tp_size``-wide tensor-parallel engine.

    What vLLM's global state held before is put back on exit, also after an error.
    """
    before = {name: getattr(parallel_state, name, None) for name in _WORLD_GROUPS}
    try:
        for name in _WORLD_GROUPS:
            sharded = name in _SHARDED_GROUPS
            group = _StandInGroup(name=name, world_size=tp_size if sharded else 1, rank=rank if sharded else 0)
            setattr(parallel_state, name, group)
        yield
    finally:
        for name, group_before in before.items():
            setattr(parallel_state, name, group_before)


def inspect_architectures_in_process() -> None:
    """Let vLLM look at model classes in this process instead of starting one for each architecture.

    vLLM starts a process (tens of seconds, once per architecture and machine) so that its caller stays free of
    CUDA. A process that only builds trees has nothing to protect.
    """
    registry._run_in_subprocess = lambda function: function()


def tree_config(model: str, **engine_args: Any) -> VllmConfig:
    """The configuration that vLLM resolves for a weightless TP=1 engine of ``model``.

    Args:
        model: a local folder or a Hugging Face id; only ``config.json`` is read.
        engine_args: vLLM's own engine arguments; those that only place the engine are ignored.

    Raises:
        ValueError, OSError: vLLM's own, when the model or an argument is unknown to it.
    """
    kept = {name: value for name, value in engine_args.items() if name not in _PLACEMENT_ARGS}
    kept.setdefault("skip_tokenizer_init", True)
    return EngineArgs(model=model, enforce_eager=True, load_format="dummy", **kept).create_engine_config()


@contextlib.contextmanager
def _own_rotary_modules() -> Iterator[None]:
    """Keep vLLM's cache of rotary modules apart: a tree must not share one with an engine, nor leave one."""
    before = dict(rotary_embedding._ROPE_DICT)
    rotary_embedding._ROPE_DICT.clear()
    try:
        yield
    finally:
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(before)


@contextlib.contextmanager
def own_model_classes() -> Iterator[None]:
    """Keep the Transformers backend from changing Hugging Face's classes for good: they stay usable beside a tree."""
    with mock.patch.object(TransformersBase, "_decorate_cls_for_torch_compile", lambda *_args, **_kwargs: None):
        yield


def build_tree_from_config(vllm_config: VllmConfig) -> nn.Module:
    """The meta-device module tree of a configuration; call it inside :func:`parallel_groups`."""
    dtype = vllm_config.model_config.dtype
    with (
        _own_rotary_modules(),
        own_model_classes(),
        set_current_vllm_config(vllm_config),
        set_default_torch_dtype(dtype),
        torch.device("meta"),
    ):
        model = initialize_model(vllm_config)
    # The Transformers backend keeps its buffers on the host whatever the device context says.
    return model.to("meta").eval()


def build_model_tree(model: str, **engine_args: Any) -> nn.Module:
    """The module tree that vLLM builds of ``model``, at TP=1 with every parameter on the meta device.

    Args:
        model: a local folder or a Hugging Face id; only ``config.json`` is read.
        engine_args: vLLM's own engine arguments (``quantization``, ``hf_overrides``, ``dtype`` …); those that
            only place the engine (``tensor_parallel_size`` …) are ignored.

    Returns:
        The same module that an engine would hold: paths, classes and ``repr`` are vLLM's.
    """
    config = tree_config(model, **engine_args)
    with parallel_groups():
        tree = build_tree_from_config(config)
    tree.vllm_config = config
    return tree
