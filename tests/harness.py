"""A harvest in this process: a run folder, a real engine and its feeder, without Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from actors.feeder import Feeder, read_planned
from actors.protocol import EngineSpec, Lease, UnitFailure
from actors.selection import Selection
from actors.worker.llm import Llm
from harvest.config import RunConfig
from harvest.runs import engine_spec, open_or_plan
from storage.commit import Committer
from storage.format import LocationSpec, StoreLayout
from storage.plan_files import INVOKE_SCHEMA, PlanSource
from storage.reader import StoreReader
from storage.run_folder import RunFolder

ROWS_PER_SHARD = 4096


def make_run(
    path: Path,
    prompts: Sequence[Sequence[int]],
    locations: Sequence[Any],
    *,
    n_units: int = 1,
    selection: Selection | None = None,
    max_tokens: int | Sequence[int] = 1,
    dtype: Literal["bfloat16", "float16", "float32"] = "float32",
    order: Sequence[int] | None = None,
    rows_per_shard: int = ROWS_PER_SHARD,
    unit_rows: int | None = None,
    logprobs: bool = False,
) -> RunFolder:
    """A planned run of `prompts` (invoke i is prompt i), dealt to units in turn in the given order."""
    selection = selection or Selection()
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    all_rows = sum(len(p) + m for p, m in zip(prompts, limits, strict=True))
    layout = StoreLayout(
        locations=tuple(
            LocationSpec(name=x.array, path=x.path, alias=x.alias, width=x.width, dtype=dtype) for x in locations
        ),
        rows_per_shard=rows_per_shard,
        shards_per_unit=-(-(unit_rows or all_rows) // rows_per_shard),
        n_units=n_units,
        n_invokes=len(prompts),
        logprobs=logprobs,
        nan_logprobs=logprobs,
    )
    units: list[list[dict[str, Any]]] = [[] for _ in range(n_units)]
    used = [0] * n_units
    for number, invoke in enumerate(order if order is not None else range(len(prompts))):
        unit = number % n_units
        n_rows = selection.count(
            n_prompt_tokens=len(prompts[invoke]), max_tokens=limits[invoke], token_ids=list(prompts[invoke])
        )
        units[unit].append(
            {
                "invoke": invoke,
                "key": None,
                "unit": unit,
                "row_start": unit * layout.unit_rows + used[unit],
                "n_rows": n_rows,
                "n_prompt_tokens": len(prompts[invoke]),
                "max_tokens": limits[invoke],
                "truncated": False,
                "token_ids": list(prompts[invoke]),
            }
        )
        used[unit] += n_rows
    tables = [pa.Table.from_pylist(unit, schema=INVOKE_SCHEMA) for unit in units]
    return RunFolder.create(path, layout=layout, plan=PlanSource(units=tables), run={}, config_toml="", provenance={})


@contextmanager
def engine(
    run: RunFolder, model: Path, locations: Sequence[Any], *, selection: Selection | None = None, **changes: Any
) -> Iterator[Feeder]:
    """A running feeder over a real engine, for the units of `run`."""
    vllm = {"max_num_seqs": 16, **changes.pop("vllm", {})}
    spec = EngineSpec(
        run_path=str(run.path),
        model=str(model),
        locations=tuple(x.name for x in locations),
        layout=run.layout,
        selection=selection or Selection(),
        **{"sampling": {"temperature": 0.0}, "max_model_len": 512, "vllm": vllm, **changes},
    )
    with feeding(spec, run) as feeder:
        yield feeder


@contextmanager
def feeding(spec: EngineSpec, run: RunFolder) -> Iterator[Feeder]:
    """A running feeder over a real engine made from `spec`."""
    llm = Llm(spec)

    read_unit = partial(read_planned, run.plan, unit_rows=run.layout.unit_rows)

    feeder = Feeder(llm, spec, read_unit)
    broken: list[BaseException] = []

    def loop() -> None:
        try:
            feeder.run()
        except BaseException as error:
            broken.append(error)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield feeder
    finally:
        feeder.stop()
        thread.join()
        llm.close()
    if broken:
        raise broken[0]


def harvest(run: RunFolder, feeder: Feeder, *, timeout_s: float = 120) -> StoreReader:
    """Run all units at once through the feeder and finish the run."""
    with Committer.open(run) as committer:
        futures = [
            feeder.submit(Lease(unit=unit, attempt=committer.next_attempt(unit))) for unit in range(run.layout.n_units)
        ]
        receipts = []
        for future in futures:
            result = future.result(timeout_s)
            assert not isinstance(result, UnitFailure), result.traceback
            assert result.storage is not None
            receipts.append(result.storage)
        published = committer.publish(receipts)
        assert not published.refused, published.refused
        committer.finalise()
    return StoreReader(run)


def harvest_config(config: RunConfig, **changes: Any) -> StoreReader:
    """Plan a configuration and harvest it, as `harvest run` does, but in this process and without Ray.

    `changes` replace fields of the engine's spec.
    """
    folder = RunFolder.open(open_or_plan(config).path)
    with feeding(replace(engine_spec(config, folder), **changes), folder) as feeder:
        return harvest(folder, feeder)
