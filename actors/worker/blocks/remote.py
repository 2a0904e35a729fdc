"""RemoteBlockEngine: a BlockEngine in a Ray actor, for a caller without the devices.

The actor owns the engine, its worker processes and its devices. When it dies, the next request starts a new one.
Blocks, their outcomes and vLLM's outputs travel through Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.worker.blocks.engine import BlockEngine, BlockRequest, BlockRun, EngineLostError, check_engine_args


class BlockEngineActor:
    """Runs inside the actor."""

    def __init__(self, model: str, engine_args: dict[str, Any], settings: dict[str, Any]) -> None:
        self._engine = BlockEngine(model, engine_args, **settings)

    def run(self, requests: Sequence[BlockRequest]) -> list[BlockRun]:
        """See BlockEngine.run."""
        return self._engine.run(requests)

    def tokenizer(self) -> Any:
        """The engine's tokenizer."""
        return self._engine.tokenizer

    def count_blocks(self) -> list[int]:
        """See BlockEngine.count_blocks."""
        return self._engine.count_blocks()

    def close(self) -> None:
        """Shut the engine down; its worker processes would outlive the actor."""
        self._engine.close()


class RemoteBlockEngine:
    """The interface of BlockEngine on an actor.

    Args:
        model: a folder that the actor's node sees, or a Hugging Face id.
        engine_args: vLLM's engine arguments.
        ray_options: options of the Ray actor; by default as many GPUs as there are ranks, where the cluster has GPUs.
        settings: keyword arguments of BlockEngine.
    """

    def __init__(
        self, model: str, engine_args: dict[str, Any], *, ray_options: Mapping[str, Any], **settings: Any
    ) -> None:
        check_engine_args(engine_args)
        if not ray.is_initialized():
            ray.init()
        options: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0}
        if ray.cluster_resources().get("GPU"):
            options["num_gpus"] = int(engine_args.get("tensor_parallel_size", 1))
        options |= ray_options
        self._lost = False
        self._actor: Any = ray.remote(BlockEngineActor).options(**options).remote(model, engine_args, settings)
        self._tokenizer: Any = None
        self.count_blocks()

    @property
    def lost(self) -> bool:
        """Whether the actor or its engine is gone."""
        return self._lost

    @property
    def tokenizer(self) -> Any:
        """A copy of the engine's tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = self._call("tokenizer")
        return self._tokenizer

    def module_tree(self) -> Any:
        """None: the model is in another process."""
        return None

    def run(self, requests: Sequence[BlockRequest]) -> list[BlockRun]:
        """See BlockEngine.run."""
        runs: list[BlockRun] = self._call("run", list(requests))
        return runs

    def count_blocks(self) -> list[int]:
        """See BlockEngine.count_blocks."""
        counts: list[int] = self._call("count_blocks")
        return counts

    def close(self) -> None:
        """Shut the engine down and end the actor."""
        if self._lost:
            return
        try:
            self._call("close")
        finally:
            self._lost = True
            ray.kill(self._actor)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments))
        except RayActorError as error:
            self._lost = True
            raise EngineLostError(f"the engine's actor died: {error}") from error
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, EngineLostError):
                self._lost = True
                ray.kill(self._actor)
            raise cause from error
        except KeyboardInterrupt:
            self._lost = True
            ray.kill(self._actor)
            raise
