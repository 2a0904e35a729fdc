"""What reading and tokenising cost: `python -m tests.benchmarks.tokenization [--copies N] [--rounds N]`.

CPU seconds of this process, as ratios to what cannot be saved: the tokenizer library on the same texts, in memory.
Every round runs all of them; the median over the rounds is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def measure(action: Callable[[], Any]) -> float:
    """CPU seconds of this process."""
    begin = time.process_time()
    action()
    return time.process_time() - begin


def main() -> None:
    """Measure and print."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer as FastTokenizer

    from harvest.config import DatasetConfig, TokenizationConfig
    from harvest.dataset import open_dataset
    from harvest.demo_text import make_demo_prompts
    from harvest.tokenization import tokenize
    from harvest.tokenizer import TokenizerSource
    from tests.tiny_models import train_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=20, help="of the demo text (default 20)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    texts = [prompt.text for prompt in make_demo_prompts()] * options.copies
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = train_tokenizer(root / "tokenizer")
        lines = (json.dumps({"id": index, "text": text}) for index, text in enumerate(texts))
        (root / "texts.jsonl").write_text("\n".join(lines))
        pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), root / "texts.parquet")
        fast = FastTokenizer.from_file(str(model / "tokenizer.json"))

        def read(name: str, **fields: Any) -> None:
            for _ in open_dataset(DatasetConfig(path=str(root / name), **fields)).records():
                continue

        def encode() -> None:
            dataset = open_dataset(DatasetConfig(path=str(root / "texts.jsonl"), id_column="id"))
            source, config = TokenizerSource(name=str(model)), TokenizationConfig(processes=1)
            for _ in tokenize(dataset, source, config, max_length=100_000):
                continue

        actions: dict[str, Callable[[], Any]] = {
            "tokenizer library alone": lambda: [found.ids for found in fast.encode_batch(texts)],
            "read JSON lines": lambda: read("texts.jsonl"),
            "read JSON lines with ids": lambda: read("texts.jsonl", id_column="id"),
            "read Parquet": lambda: read("texts.parquet"),
            "fingerprint": lambda: open_dataset(DatasetConfig(path=str(root / "texts.jsonl"))).fingerprint,
            "read JSON lines and tokenise": encode,
        }
        encode()  # imports
        seconds: dict[str, list[float]] = {name: [] for name in actions}
        for _ in range(options.rounds):
            for name, action in actions.items():
                seconds[name].append(measure(action))
    base = seconds["tokenizer library alone"]
    for name, found in seconds.items():
        ratio = statistics.median(each / alone for each, alone in zip(found, base, strict=True))
        print(f"{name:32} {ratio:6.3f}")


if __name__ == "__main__":
    main()
