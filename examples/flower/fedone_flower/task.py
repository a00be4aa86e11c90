"""The task: the embedded model classifies customer feedback, after a prompt of four words."""

from __future__ import annotations

from functools import cache

from fedone_sdk import TaskSpec, Vocabulary, assets
from fedone_sdk.data import load_examples
from fedone_sdk.task import Example

TASK = TaskSpec(
    template=" {text} It was{prompt} {mask}.", labels={0: " disappointing", 1: " great"}
)
WORDS = Vocabulary(candidates=("", " really", " not", " so", " just", " truly", " what", " a"))
POSITIONS = 4


@cache  # Nodes of a simulation share a process.
def split(name: str) -> tuple[Example, ...]:
    """Return the rows of ``train`` or ``dev``."""
    return tuple(load_examples(assets.path("companion_feedback") / f"{name}.jsonl"))


def shard(partition: int, num_partitions: int) -> list[Example]:
    """Return the training rows of a simulated node."""
    rows = split("train")
    return [row for number, row in enumerate(rows) if number % num_partitions == partition]
