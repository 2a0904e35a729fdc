"""`harvest verify`: the store's own check of every byte, row and label, and with `--parity` the values as well."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from actors.lora import Adapter, AdapterError, read_adapter
from actors.model_files import ModelChanged, check_model
from actors.selection import Selection
from harvest.model_config import planned_revision
from harvest.parity import ParityError, ParityReport, StoredPrompt, compare
from harvest.summary import read_events
from storage.reader import Prompt, StoreReader
from storage.verify import VerifyReport, verify


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """Both reports of one run."""

    store: VerifyReport
    parity: ParityReport | None
    """None where it was not asked for, or the store is damaged."""
    parity_was_asked: bool = False

    @property
    def passed(self) -> bool:
        """No damage, and parity within tolerance where it was asked for."""
        return self.store.ok and (self.parity is None or self.parity.passed)

    def to_json(self) -> dict[str, Any]:
        """Machine-readable form."""
        parity = None if self.parity is None else {**asdict(self.parity), "passed": self.parity.passed}
        return {"passed": self.passed, "store": self.store.to_json(), "parity": parity}

    def print(self, console: Console) -> None:
        """Print both reports."""
        store = self.store
        for finding in store.findings:
            console.print(escape(str(finding)))
        verdict = "[green]intact[/]" if store.ok else "[bold red]DAMAGED[/]"
        console.print(
            f"store {verdict}: {store.units_committed:,} of {store.units_planned:,} units, "
            f"{store.files_checked:,} files, {store.bytes_checked:,} bytes, {store.rows_checked:,} rows, "
            "each planned row once"
            if store.ok
            else f"store {verdict}: {len(store.findings)} findings"
        )
        if self.parity is not None:
            _print_parity(console, self.parity)
        elif self.parity_was_asked:
            console.print("parity not computed: the store is damaged")


def verify_run(path: Path | str, *, parity: int = 0, seed: int = 0) -> Verification:
    """Check a run.

    Args:
        path: the run folder.
        parity: prompts to recompute with transformers; 0 needs no model, dataset, network, Ray or vLLM.
        seed: chooses them.

    Raises:
        ParityError: the values cannot be compared.
    """
    report = verify(path)
    compared = _compare(path, parity, seed) if parity and report.ok else None
    return Verification(store=report, parity=compared, parity_was_asked=bool(parity))


def _compare(path: Path | str, n_prompts: int, seed: int) -> ParityReport:
    reader = StoreReader(path)
    run = reader.run.run
    plan = reader.run.plan.summary()
    committed = np.isin(plan.column("unit").to_numpy(), sorted(reader.committed))
    invokes = plan.column("invoke").to_numpy()[committed]
    if not len(invokes):
        raise ParityError(f"{path} has no committed unit yet; run the harvest first")
    selection = Selection.from_json(run["selection"])
    chosen = np.random.default_rng(seed).choice(invokes, min(n_prompts, len(invokes)), replace=False)
    prompts = []
    for invoke in sorted(chosen.tolist()):
        stored = reader.prompt(invoke)
        if not len(stored.positions):
            continue
        prompts.append(
            StoredPrompt(
                invoke=invoke,
                token_ids=_sequence(stored.prompt_token_ids, stored.positions, stored.token_ids),
                positions=stored.positions.astype(np.int64),
                covered=_covered(selection, stored),
                rows={
                    _plain_name(location.name, run["locations"]): stored.rows[location.name]
                    for location in reader.locations
                },
            )
        )
    if not prompts:
        raise ParityError(
            f"none of the {len(chosen)} prompts that were drawn has a stored row (answers that ended at once have "
            "none): draw others with --seed, or more with --parity"
        )
    try:
        check_model(run["model"], run.get("model_sha256"))
    except ModelChanged as error:
        raise ParityError(str(error)) from error
    content = run["content"]
    ready = [event for event in read_events(reader.run.events) if event["event"] == "engine_ready"]
    return compare(
        run["model"],
        prompts,
        compute_dtype=ready[-1]["compute_dtype"] if ready else content["model"]["dtype"],
        store_dtype=reader.layout.locations[0].dtype,
        reduce=selection.reduce,
        trust_remote_code=content["model"]["trust_remote_code"],
        revision=planned_revision(run),
        adapter=_find_adapter(run["lora"]) if run.get("lora") else None,
    )


def _find_adapter(planned: dict[str, Any]) -> Adapter:
    try:
        adapter = read_adapter(planned["name"])
        adapter.check(planned["sha256"])
    except AdapterError as error:
        raise ParityError(f"the run's LoRA adapter is needed to recompute its values: {error}") from error
    return adapter


def _covered(selection: Selection, stored: Prompt) -> np.ndarray[Any, Any] | None:
    if selection.reduce is None:
        return None
    return selection.positions(
        n_prompt_tokens=stored.n_prompt_tokens,
        max_tokens=1,  # a reduction is over prompt tokens alone
        invoke=stored.invoke,
        token_ids=stored.prompt_token_ids.tolist(),
        spans=None if stored.row_spans is None else stored.row_spans.reshape(-1).tolist(),
    )


def _plain_name(array: str, locations: list[dict[str, Any]]) -> str:
    return next(str(location["name"]) for location in locations if location["array"] == array)


def _sequence(
    prompt: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], token_ids: np.ndarray[Any, Any]
) -> list[int]:
    """The token ids up to the last stored position: the prompt, then generated tokens, which must all have rows."""
    sequence: list[int] = prompt.tolist()[: int(positions[-1]) + 1]
    generated = token_ids[positions >= len(prompt)].tolist()
    needed = int(positions[-1]) + 1 - len(prompt)
    if needed > len(generated):
        raise ParityError(
            "generated tokens without rows are not stored, so their prompts cannot be recomputed: parity needs every "
            "generated token selected"
        )
    return sequence + generated


def _print_parity(console: Console, report: ParityReport) -> None:
    table = Table("location", "rows", "min cosine", "relative error", "norm ratio", "tolerance", "")
    for entry in report.locations:
        verdict = escape(entry.note) if entry.note else "[green]ok[/]" if entry.passed else "[bold red]FAILED[/]"
        table.add_row(
            escape(entry.location),
            f"{entry.n_rows:,}",
            f"{entry.cosine:.6f}",
            f"{entry.relative_error:.2e}",
            f"{entry.norm_ratio:.6f}",
            f"{entry.tolerance:.0e}",
            verdict,
        )
    console.print(table)
    verdict = "[green]ok[/]" if report.passed else "[bold red]FAILED[/]"
    console.print(f"parity {verdict} over {len(report.invokes)} prompts")
