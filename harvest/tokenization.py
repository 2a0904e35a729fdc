"""Tokenise a dataset, in this process or over several, in the dataset's order whatever their number.

Large datasets are spread over processes that are started as programs of their own (`tokenization_worker`): they never
import the caller's main module, and never torch, so they start in two seconds instead of many. A few batches for each
process are in flight, so memory does not grow with the dataset.

vLLM takes a prompt only if at least one more token fits the model's length, so a prompt may have `max_length -
max_tokens` tokens.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol

from harvest.config import TokenizationConfig
from harvest.dataset import Dataset, Problem, RecordBatch
from harvest.encoding import Encoder, EncoderSettings, TokenizedBatch
from harvest.errors import ConfigError, DatasetError
from harvest.tokenization_worker import WorkerProcess
from harvest.tokenizer import TokenizerInfo, TokenizerSource

SMALL_BYTES = 8 << 20
"""A dataset below this is tokenised before a second process would have started."""
_BATCHES_PER_PROCESS = 3
_SHOWN = 5


def tokenize(
    dataset: Dataset,
    tokenizer: TokenizerSource,
    config: TokenizationConfig,
    *,
    max_length: int,
    max_tokens: int = 1,
    n_vocabulary: int | None = None,
    roles: tuple[str, ...] = (),
) -> Tokenization:
    """Turn a dataset's records into invokes.

    Args:
        dataset: the records.
        tokenizer: which tokenizer.
        config: special tokens, what happens to overlong and bad records, processes.
        max_length: the model's length in tokens, prompt and generated tokens together.
        max_tokens: tokens to generate for each prompt.
        n_vocabulary: ids the model knows (its embedding's rows); default: those of the tokenizer.
        roles: chat messages: only tokens of these roles may have rows; empty means all.

    Returns:
        An iterator of `TokenizedBatch`, to be closed (`with`) unless it is iterated to its end. While it is iterated it
        raises `DatasetError` as `Dataset.records` does, for a bad or overlong record that is to be refused, and if no
        record is left.

    Raises:
        ConfigError: no usable tokenizer, or `max_tokens` leaves no room for a prompt.
        DatasetError: see above, for the start of the dataset.
        RunError: a tokenising process died.
    """
    if max_tokens >= max_length:
        raise ConfigError(
            f"generation.max_tokens = {max_tokens} leaves no room for a prompt in the model's {max_length} tokens: "
            "lower it, or raise model.max_length if the model can"
        )
    settings = EncoderSettings(
        tokenizer=tokenizer,
        kind=dataset.kind,
        add_special_tokens=config.add_special_tokens,
        add_generation_prompt=config.add_generation_prompt,
        overlong=config.overlong,
        max_prompt_tokens=max_length - max_tokens,
        n_vocabulary=n_vocabulary,
        roles=roles,
    )
    batches = dataset.records()
    start, is_small = _read_start(batches)
    encoders = _start_encoders(settings, config.processes, is_small)
    return Tokenization(itertools.chain(start, batches), encoders, config)


class _Encodes(Protocol):
    @property
    def info(self) -> TokenizerInfo: ...

    def encode(self, batch: RecordBatch) -> TokenizedBatch: ...

    def close(self) -> None: ...


class Tokenization:
    """The invokes of a dataset, in batches, once. Made by `tokenize`."""

    tokenizer: TokenizerInfo

    def __init__(self, batches: Iterator[RecordBatch], encoders: list[_Encodes], config: TokenizationConfig) -> None:
        self._config = config
        self._encoders = encoders
        self._output = self._checked(batches)
        try:
            self.tokenizer = encoders[0].info
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[TokenizedBatch]:
        return self._output

    def __enter__(self) -> Tokenization:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes. What was not iterated is not tokenised."""
        self._output.close()
        for encoder in self._encoders:
            encoder.close()

    def _checked(self, batches: Iterator[RecordBatch]) -> Generator[TokenizedBatch, None, None]:
        n_invokes = n_records = 0
        problems: list[Problem] = []
        try:
            for batch in _encode_in_order(batches, self._encoders):
                self._refuse(batch)
                n_records += batch.n_records
                n_invokes += batch.invokes.num_rows
                problems.extend(batch.skipped[: _SHOWN - len(problems)])
                yield batch
        finally:
            for encoder in self._encoders:
                encoder.close()
        if not n_invokes:
            raise DatasetError(f"none of the dataset's {n_records} records can be used; {_list(problems)}")

    def _refuse(self, batch: TokenizedBatch) -> None:
        overlong = [problem for problem in batch.skipped if problem.reason == "overlong"]
        if overlong and self._config.overlong == "refuse":
            raise DatasetError(
                f"a prompt is longer than the model takes; {_list(overlong)}. Set tokenization.overlong to truncate, "
                "split or skip, or raise model.max_length if the model can"
            )
        bad = [problem for problem in batch.skipped if problem.reason != "overlong"]
        if bad and self._config.bad_records == "refuse":
            raise DatasetError(
                f'a record cannot be used; {_list(bad)}. Mend it, or set tokenization.bad_records = "skip" to go on '
                "without such records (they are listed in the run)"
            )


def _read_start(batches: Iterator[RecordBatch]) -> tuple[list[RecordBatch], bool]:
    """The first batches, and whether they are all and few."""
    start: list[RecordBatch] = []
    n_bytes = 0
    for batch in batches:
        start.append(batch)
        n_bytes += batch.table.nbytes
        if n_bytes > SMALL_BYTES:
            return start, False
    return start, True


def _start_encoders(settings: EncoderSettings, processes: int, is_small: bool) -> list[_Encodes]:
    # With torch here already, transformers loads as fast in this process as in another.
    if processes == 1 or (processes == 0 and is_small and "torch" in sys.modules):
        return [Encoder(settings)]
    n_processes = processes or (1 if is_small else len(os.sched_getaffinity(0)))
    return [WorkerProcess(settings, parallel=n_processes == 1) for _ in range(n_processes)]


def _encode_in_order(batches: Iterator[RecordBatch], encoders: list[_Encodes]) -> Iterator[TokenizedBatch]:
    if len(encoders) == 1:
        yield from map(encoders[0].encode, batches)
        return
    idle: SimpleQueue[_Encodes] = SimpleQueue()
    for encoder in encoders:
        idle.put(encoder)

    def encode(batch: RecordBatch) -> TokenizedBatch:
        encoder = idle.get()
        try:
            return encoder.encode(batch)
        finally:
            idle.put(encoder)

    pending: deque[Future[TokenizedBatch]] = deque()
    executor = ThreadPoolExecutor(max_workers=len(encoders), thread_name_prefix="tokenize")
    try:
        for batch in batches:
            pending.append(executor.submit(encode, batch))
            if len(pending) > _BATCHES_PER_PROCESS * len(encoders):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for encoder in encoders:
            encoder.close()  # so that threads which wait for an answer end
        executor.shutdown(cancel_futures=True)


def _list(problems: list[Problem]) -> str:
    more = f"; and {len(problems) - _SHOWN} more nearby" if len(problems) > _SHOWN else ""
    return "; ".join(map(str, problems[:_SHOWN])) + more
