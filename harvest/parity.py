"""Parity: recompute some stored prompts with Hugging Face transformers in float32 and compare the rows.

An independent path to the same numbers: another implementation, one prompt at a time, no batching, no cache. It finds
rows of a wrong request, layer or position, which no checksum can.

Tolerances on the relative error |ours - reference| / |reference| (Frobenius norms over all compared rows of a
location):

- float32 computed and stored: 1e-4. Both sides round in another order; seen are a few 1e-6.
- float32 computed, bfloat16 stored: 4e-3. Rounding to 8 bits of mantissa errs by up to 2^-9 = 2e-3 of each value.
- float32 computed, float16 stored: 1e-3, by the same reasoning (11 bits).
- bfloat16 or float16 computed: 5e-2. Each layer rounds again, and errors add up over the depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.lora import Adapter
from actors.selection import Reduce
from harvest.errors import HarvestError
from harvest.lora import merge_adapter

if TYPE_CHECKING:
    from torch import Tensor, nn

TOLERANCES = {("float32", "float32"): 1e-4, ("float32", "bfloat16"): 4e-3, ("float32", "float16"): 1e-3}
LOW_PRECISION_TOLERANCE = 5e-2


class ParityError(HarvestError):
    """The comparison cannot be made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocationParity:
    """How the rows of one location compare."""

    location: str
    n_rows: int
    cosine: float
    """Smallest cosine of a row with its reference."""
    relative_error: float
    norm_ratio: float
    """Norm of all rows over the norm of their references."""
    tolerance: float
    passed: bool
    note: str = ""
    """Why a location could not be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityReport:
    """The comparison of some prompts."""

    invokes: tuple[int, ...]
    locations: tuple[LocationParity, ...]

    @property
    def passed(self) -> bool:
        """All comparable locations are within tolerance, and at least one is comparable."""
        compared = [entry for entry in self.locations if not entry.note]
        return bool(compared) and all(entry.passed for entry in compared)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPrompt:
    """One stored prompt to compare. S tokens, M rows."""

    invoke: int
    token_ids: Sequence[int]
    """[S] prompt and those generated tokens that have rows."""
    positions: np.ndarray[Any, Any]
    """[M] positions of the rows."""
    covered: np.ndarray[Any, Any] | None = None
    """Positions that the one row covers, where rows were reduced."""
    rows: dict[str, np.ndarray[Any, Any]]
    """[M, width] by location."""


def compare(
    model_path: str,
    prompts: Sequence[StoredPrompt],
    *,
    compute_dtype: str,
    store_dtype: str,
    reduce: Reduce | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    adapter: Adapter | None = None,
) -> ParityReport:
    """Recompute prompts with transformers and compare each location.

    Args:
        model_path: Hugging Face id or folder.
        prompts: what is stored.
        compute_dtype: dtype in which the engine computed.
        store_dtype: dtype of the store.
        reduce: how `covered` became one row.
        trust_remote_code: run code that ships with the model.
        revision: of a Hugging Face id.
        adapter: LoRA adapter to merge into the weights.

    Raises:
        ParityError: transformers cannot load the model, or not find its layers.
        MergeError: the adapter does not fit it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=trust_remote_code,
            revision=revision,
        ).eval()
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ParityError(
            f"transformers cannot load the run's model {model_path}: {type(error).__name__}: {error}. Parity needs the "
            "model where the run had it; without --parity the store alone is checked"
        ) from error
    if adapter is not None:
        merge_adapter(model, adapter)
    names = list(prompts[0].rows) if prompts else []
    readers = {name: _reader(model, name) for name in names}
    sums = {name: _Sums() for name in names}
    for prompt in prompts:
        with torch.inference_mode(), _recording(readers) as recorded:
            model(torch.tensor([list(prompt.token_ids)]), use_cache=False)
        for name in names:
            if recorded.get(name) is not None:
                whole = recorded[name].reshape(len(prompt.token_ids), -1)
                reference = _reduced(whole, prompt.covered, reduce) if reduce else whole[prompt.positions]
                sums[name].add(prompt.rows[name].astype(np.float64), reference.double().numpy())
    tolerance = TOLERANCES.get((compute_dtype, store_dtype), LOW_PRECISION_TOLERANCE)
    return ParityReport(
        invokes=tuple(prompt.invoke for prompt in prompts),
        locations=tuple(sums[name].result(name, tolerance, comparable=readers[name] is not None) for name in names),
    )


def _reduced(rows: Tensor, covered: np.ndarray[Any, Any] | None, reduce: Reduce) -> Tensor:
    assert covered is not None
    picked = rows[covered].double()
    return (picked.mean(0) if reduce == "mean" else picked.amax(0)).unsqueeze(0)


class _Sums:
    """Running sums over compared rows."""

    def __init__(self) -> None:
        self._n_rows = 0
        self._cosine = 1.0
        self._error = self._ours = self._reference = 0.0

    def add(self, ours: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]) -> None:
        self._n_rows += len(ours)
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(reference, axis=1)
        dots = (ours * reference).sum(axis=1)
        # Unlike min, this keeps a NaN.
        self._cosine = float(np.minimum(self._cosine, (dots / np.maximum(norms, 1e-300)).min(initial=1.0)))
        self._error += float(((ours - reference) ** 2).sum())
        self._ours += float((ours**2).sum())
        self._reference += float((reference**2).sum())

    def result(self, location: str, tolerance: float, *, comparable: bool) -> LocationParity:
        scale = max(self._reference, 1e-300)
        error = float(np.sqrt(self._error / scale))
        note = "" if self._n_rows else "no rows to compare"
        return LocationParity(
            location=location,
            n_rows=self._n_rows,
            cosine=self._cosine,
            relative_error=error,
            norm_ratio=float(np.sqrt(self._ours / scale)),
            tolerance=tolerance,
            passed=bool(self._n_rows) and error <= tolerance,
            note=note if comparable else "transformers has no module for this location",
        )


# A reader says which module to hook, on which side, and how to get [tokens, width] out of it.
@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    module: nn.Module
    side: str
    pick: Callable[[Any], Tensor]


def _first(value: Any) -> Tensor:
    while isinstance(value, tuple | list):
        value = value[0]
    return value


def _reader(model: nn.Module, name: str) -> _Reader | None:
    """The transformers counterpart of a location name, None where there is none."""
    alias, _, number = name.partition(".")
    backbone, layers = _find_layers(model)
    whole = {"embed": (("embed_tokens", "wte", "embed_in", "word_embeddings"), "output")}
    whole["final_norm"] = (("norm", "final_layernorm", "ln_f", "final_layer_norm"), "output")
    if alias in whole and not number:
        return _child_reader(backbone, *whole[alias])
    if not number.isdigit() or int(number) >= len(layers):
        return None
    layer = layers[int(number)]
    match alias:
        case "residual" | "residual_post":
            return _Reader(module=layer, side="output", pick=_first)
        case "residual_pre":
            return _Reader(module=layer, side="input", pick=_first)
    children = {
        "attn_out": ((("self_attn", "attn", "attention", "self_attention"), "output"),),
        "mlp_out": ((("mlp", "feed_forward"), "output"),),
        "heads": (
            (("self_attn", "attn", "attention", "self_attention"), ""),
            (("o_proj", "c_proj", "dense", "out_proj"), "input"),
        ),
        "neurons": ((("mlp", "feed_forward"), ""), (("down_proj", "c_proj", "dense_4h_to_h", "fc2"), "input")),
    }
    found: nn.Module | None = layer
    for names, side in children.get(alias, ()):
        found = next((getattr(found, each) for each in names if hasattr(found, each)), None)
        if found is None:
            return None
        if side:
            return _Reader(module=found, side=side, pick=_first)
    return None


def _child_reader(parent: nn.Module, names: Sequence[str], side: str) -> _Reader | None:
    module = next((getattr(parent, each) for each in names if hasattr(parent, each)), None)
    return None if module is None else _Reader(module=module, side=side, pick=_first)


def _find_layers(model: nn.Module) -> tuple[nn.Module, Sequence[nn.Module]]:
    backbone = model.base_model
    if hasattr(backbone, "decoder"):
        backbone = backbone.decoder
    for name in ("layers", "h", "blocks"):
        layers = getattr(backbone, name, None)
        if layers is not None:
            return backbone, list(layers)
    raise ParityError(f"{type(model).__name__}: no list of decoder layers found in its transformers implementation")


@contextmanager
def _recording(readers: dict[str, _Reader | None]) -> Iterator[dict[str, Tensor]]:
    recorded: dict[str, Tensor] = {}
    handles = []
    for name, reader in readers.items():
        if reader is None:
            continue

        def keep_output(module: Any, args: Any, output: Any, name: str = name, reader: _Reader = reader) -> None:
            recorded[name] = reader.pick(output).detach().clone()

        def keep_input(module: Any, args: Any, kwargs: Any, name: str = name, reader: _Reader = reader) -> None:
            value = args if args else kwargs["hidden_states"]
            recorded[name] = reader.pick(value).detach().clone()

        if reader.side == "output":
            handles.append(reader.module.register_forward_hook(keep_output))
        else:
            handles.append(reader.module.register_forward_pre_hook(keep_input, with_kwargs=True))
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
