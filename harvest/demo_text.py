"""Real English prose that is on every machine: the standard library's language reference, cut into prompts.

`pydoc_data.topics` holds the text behind `help("...")`. Its paragraphs of prose (no code, tables or grammar) become
prompts of one to four paragraphs, each with a stable id `<topic>/<number>`. The order and the cuts depend on the text
alone, so that one Python version always gives the same bytes; another version may word its reference differently.

    python -m harvest.demo_text out/demo-text.jsonl
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

_N_PROMPTS = 240
_PARAGRAPHS_PER_PROMPT = (1, 2, 1, 1, 4, 1)  # varied lengths, in a fixed order
_MIN_PARAGRAPH_CHARS = 60
_NOT_PROSE = ("   ", "+-", "|", "*****", "=====")  # how a line of code, a table or a heading begins
_SENTENCE_END = re.compile(r"[.:!?)]['\"”’*]*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoPrompt:
    """One line of the demo's dataset."""

    id: str
    text: str


def make_demo_prompts(n_prompts: int = _N_PROMPTS) -> list[DemoPrompt]:
    """At most `n_prompts` prompts, taken from all topics in turn so that subjects and lengths vary."""
    from pydoc_data.topics import topics

    by_topic = [list(_cut_topic(name, topics[name])) for name in sorted(topics)]
    prompts: list[DemoPrompt] = []
    seen: set[str] = set()
    for rank in range(max(map(len, by_topic), default=0)):
        for topic_prompts in by_topic:
            # Some topics repeat others' text; a text is taken once.
            if rank < len(topic_prompts) and topic_prompts[rank].text not in seen:
                seen.add(topic_prompts[rank].text)
                prompts.append(topic_prompts[rank])
    return prompts[:n_prompts]


def write_demo_text(path: Path, n_prompts: int = _N_PROMPTS) -> int:
    """Write the prompts as JSON lines (`id`, `text`) and return how many; an equal file stays untouched."""
    prompts = make_demo_prompts(n_prompts)
    lines = "".join(json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts)
    content = lines.encode("utf-8")
    if not (path.is_file() and path.read_bytes() == content):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_bytes(content)
        aside.rename(path)
    return len(prompts)


def _cut_topic(name: str, text: str) -> Iterator[DemoPrompt]:
    paragraphs = list(_prose_paragraphs(text))
    start = number = 0
    # Each topic enters the cycle of lengths at its own place, given by its name.
    counts = cycle(_PARAGRAPHS_PER_PROMPT)
    for _ in range(sum(name.encode()) % len(_PARAGRAPHS_PER_PROMPT)):
        next(counts)
    while start < len(paragraphs):
        count = next(counts)
        yield DemoPrompt(id=f"{name}/{number}", text="\n\n".join(paragraphs[start : start + count]))
        start += count
        number += 1


def _prose_paragraphs(text: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        if any(line.startswith(_NOT_PROSE) or line.lstrip().startswith(">>>") for line in lines):
            continue
        paragraph = " ".join(" ".join(lines).split())
        if len(paragraph) >= _MIN_PARAGRAPH_CHARS and "::=" not in paragraph and _SENTENCE_END.search(paragraph):
            yield paragraph


def main(arguments: list[str] | None = None) -> int:
    """`python -m harvest.demo_text PATH`: write the demo's dataset; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m harvest.demo_text PATH.jsonl", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    try:
        n_prompts = write_demo_text(path)
    except OSError as error:
        print(f"The demo text cannot be written to {path}: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {n_prompts} prompts of the Python language reference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
