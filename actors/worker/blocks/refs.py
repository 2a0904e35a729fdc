"""What a block's names stand for inside the engine: the model, its modules and the tracer.

Reading a location waits for it; assigning to one waits for it and replaces it. Everything else of a module (weights,
sizes, its children) can be read at any time; calling a module runs it on the block's own tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from actors.worker.blocks.errors import BlockStopped, LocationError, OutOfOrderError
from actors.worker.blocks.task import Wait
from actors.worker.blocks.wire import Reference, Referenced

if TYPE_CHECKING:
    from actors.worker.blocks.runtime import BlockRuntime
    from actors.worker.blocks.sites import ModuleSites, Site

SIDES = ("output", "input", "inputs")


class ModuleRef(Referenced):
    """A module of the engine's model, as a block sees it."""

    _sites: ModuleSites
    _runtime: BlockRuntime

    def __init__(self, runtime: BlockRuntime, path: str, sites: ModuleSites) -> None:
        attributes = self.__dict__
        attributes["_runtime"] = runtime
        attributes["_path"] = path
        attributes["_sites"] = sites

    def wire_reference(self) -> Reference:
        return ("module", self.__dict__["_path"])

    # -- locations ----------------------------------------------------------------------------------------------

    @property
    def output(self) -> Any:
        """What the module returned: own rows `[tokens, width]`, in the structure that it returned."""
        return self._runtime.read(self._sites.output, _whole)

    @output.setter
    def output(self, value: Any) -> None:
        self._runtime.write(self._sites.output, _whole, value)

    @property
    def input(self) -> Any:
        """The first argument, positional before named."""
        return self._runtime.read(self._sites.input, _first)

    @input.setter
    def input(self, value: Any) -> None:
        self._runtime.write(self._sites.input, _first, value)

    @property
    def inputs(self) -> Any:
        """All arguments as (positional, named); indexing the pair's first part gives the positional ones."""
        return self._runtime.read(self._sites.input, _whole)

    @inputs.setter
    def inputs(self, value: Any) -> None:
        self._runtime.write(self._sites.input, _whole, value)

    @property
    def source(self) -> Any:
        """The operations inside the module's forward."""
        return self._runtime.source_of(self._sites)

    # -- the module itself --------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._sites.module, name)
        if isinstance(value, nn.Module):
            value = self.__dict__[name] = self._runtime.ref(_join(self._path, name))
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in SIDES and name not in ("logits", "samples"):
            raise AttributeError(
                f"a block cannot change {name!r} of {self._path or 'the model'}: the module belongs to all requests; "
                "assign to .output, .input or .inputs"
            )
        object.__setattr__(self, name, value)

    def __getitem__(self, key: Any) -> Any:
        module = self._sites.module
        if isinstance(key, slice):
            indices = range(*key.indices(len(module)))
            return [self[index] for index in indices]
        if isinstance(key, int):
            length = len(module)
            if not -length <= key < length:
                raise IndexError(f"{self._path} has {length} entries, no entry {key}")
            key %= length
        return self._runtime.ref(_join(self._path, str(key)))

    def __len__(self) -> int:
        return len(self._sites.module)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._runtime.call_module(self._sites, args, kwargs)

    def __repr__(self) -> str:
        return repr(self._sites.module)


class ModelRef(ModuleRef):
    """The model itself, with the two values that the engine adds."""

    def wire_reference(self) -> Reference:
        return ("model", "")

    @property
    def logits(self) -> Tensor:
        """`[1, vocab]`: what the sampler is about to draw from in this step."""
        value: Tensor = self._runtime.read(self._runtime.logits_site, _whole)
        return value

    @logits.setter
    def logits(self, value: Any) -> None:
        self._runtime.write(self._runtime.logits_site, _whole, value)

    @property
    def samples(self) -> Tensor:
        """`[1, 1]`: the token that the sampler drew in this step."""
        value: Tensor = self._runtime.read(self._runtime.samples_site, _whole)
        return value

    @samples.setter
    def samples(self, value: Any) -> None:
        self._runtime.write(self._runtime.samples_site, _whole, value)

    @property
    def tokenizer(self) -> Any:
        return self._runtime.tokenizer

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("a block runs inside the engine; start traces outside of it")

    trace = generate = run = _refuse


class OperationRef:
    """One call inside a module's forward, named as `module.source` prints it."""

    def __init__(self, runtime: BlockRuntime, site_in: Site, site_out: Site) -> None:
        self.__dict__.update(_runtime=runtime, _in=site_in, _out=site_out)

    _runtime: BlockRuntime
    _in: Site
    _out: Site

    @property
    def output(self) -> Any:
        return self._runtime.read(self._out, _whole)

    @output.setter
    def output(self, value: Any) -> None:
        self._runtime.write(self._out, _whole, value)

    @property
    def input(self) -> Any:
        return self._runtime.read(self._in, _first)

    @input.setter
    def input(self, value: Any) -> None:
        self._runtime.write(self._in, _first, value)

    @property
    def inputs(self) -> Any:
        return self._runtime.read(self._in, _whole)

    @inputs.setter
    def inputs(self, value: Any) -> None:
        self._runtime.write(self._in, _whole, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in SIDES:
            raise AttributeError(f"an operation has .output, .input and .inputs, not {name!r}")
        object.__setattr__(self, name, value)


class StepLoop:
    """`tracer.iter[...]` and `tracer.all()`: yields step numbers, each once that step has begun."""

    def __init__(self, runtime: BlockRuntime, steps: Iterable[int], *, open_end: bool) -> None:
        self._runtime = runtime
        self._steps = steps
        self._open_end = open_end

    def __iter__(self) -> Iterator[int]:
        for wanted in self._steps:
            task = self._runtime.task()
            if wanted < task.step:
                raise OutOfOrderError(f"step {wanted} is over; the request is at step {task.step}")
            if wanted > task.step:
                task.wanted_step = wanted
                if task.park(Wait.OPEN_STEP if self._open_end else Wait.STEP) is END_OF_REQUEST:
                    return
            yield wanted

    def __enter__(self) -> NoReturn:
        raise TypeError("loop over steps with `for step in tracer.iter[...]:`, not with `with`")

    def __exit__(self, *_: object) -> None:
        return None


END_OF_REQUEST = object()
"""Sent to a loop without an end when its request is over."""


class StepIndex:
    """`tracer.iter`: index it with an int, a slice or a list of steps."""

    def __init__(self, runtime: BlockRuntime) -> None:
        self._runtime = runtime

    def __getitem__(self, key: Any) -> StepLoop:
        steps, open_end = steps_of(key)
        return StepLoop(self._runtime, steps, open_end=open_end)

    def __iter__(self) -> NoReturn:
        raise TypeError("index the steps: `for step in tracer.iter[:n]:`, or use tracer.all()")


def steps_of(key: Any) -> tuple[Iterable[int], bool]:
    """The steps that `tracer.iter[key]` runs, and whether they go on as long as the request does.

    Raises:
        ValueError: a negative step, or steps that are not ascending.
        TypeError: not an int, a slice or a list of ints.
    """
    if isinstance(key, slice):
        start, stop, stride = key.start or 0, key.stop, key.step or 1
        if start < 0 or stride < 1 or (stop is not None and stop < 0):
            raise ValueError(f"steps count up from 0; tracer.iter[{start}:{stop}:{stride}] does not")
        return (itertools.count(start, stride), True) if stop is None else (range(start, stop, stride), False)
    if isinstance(key, bool) or not isinstance(key, (int, list, tuple, range)):
        raise TypeError(f"tracer.iter takes an int, a slice or a list of ints, not {type(key).__name__}")
    steps = [key] if isinstance(key, int) else [int(step) for step in key]
    if any(step < 0 for step in steps):
        raise ValueError(f"steps count up from 0; tracer.iter[{key}] asks for a negative one")
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise ValueError(f"steps must ascend; tracer.iter[{key}] does not")
    return steps, False


class TracerRef(Referenced):
    """The request itself, as its block sees it."""

    def __init__(self, runtime: BlockRuntime) -> None:
        self._runtime = runtime
        self.iter = StepIndex(runtime)

    def wire_reference(self) -> Reference:
        return ("tracer", "")

    def all(self) -> StepLoop:
        """Every step until the request ends."""
        return self.iter[:]

    @property
    def step(self) -> int:
        """The step that the request is in."""
        return self._runtime.task().step

    @property
    def result(self) -> Any:
        """VLLM's RequestOutput once the request has finished. Read it last."""
        return self._runtime.result()

    def cache(
        self,
        modules: Iterable[Any] | None = None,
        *,
        include_output: bool = True,
        include_inputs: bool = False,
        device: str | None = "cpu",
        dtype: Any = None,
    ) -> Any:
        """Record modules at this and every later step, also after the block's last statement.

        Args:
            modules: modules or their paths; None for all of them.
            include_output: whether to record what they return.
            include_inputs: whether to record their arguments.
            device: where the copies are kept; None for the engine's.
            dtype: what floating-point copies are converted to; None for as they are.

        Returns:
            `cache["model.layers.3.mlp"].output`: the own rows, a list over steps when there are several. Save it.
        """
        return self._runtime.start_cache(
            None if modules is None else list(modules),
            sides=("output",) * include_output + ("input",) * include_inputs,
            device=device,
            dtype=dtype,
        )

    def stop(self) -> NoReturn:
        """End the block here and the request after this step."""
        self._runtime.task().stopped = True
        raise BlockStopped

    def barrier(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(BARRIER_MESSAGE)

    def invoke(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("this block already is one request; open invokes in a trace without a prompt")


BARRIER_MESSAGE = (
    "invokes do not share a forward pass, so a barrier cannot make one wait for another; save the value in one trace "
    "and use it in the next"
)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _whole(value: Any) -> Any:
    return value


def _first(value: Any) -> Any:
    args, kwargs = value
    if args:
        return args[0]
    for first in kwargs.values():
        return first
    raise LocationError("the module was called without arguments")


__all__ = ["END_OF_REQUEST", "ModelRef", "ModuleRef", "OperationRef", "StepLoop", "TracerRef"]
