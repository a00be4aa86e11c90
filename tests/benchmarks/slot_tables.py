"""Tables of real answers: every combination of a cell's candidates on every row."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import numpy as np

from fedone_sdk import TaskSpec
from fedone_sdk.backends.base import LLMBackend, Query
from fedone_sdk.backends.queries import query_for
from tests.benchmarks.slot_cells import Cell, Place, Row, drawn

Combination = tuple[int, ...]


def build(name: str, cell: Cell, place: Place, folder: Path, *, threads: int | None = None) -> None:
    """Query the missing combinations of a table, and write it when complete.

    Answers are kept in ``parts/NAME.jsonl``, so an interrupted build resumes.
    """
    asyncio.run(_build(name, cell, place, folder, threads))


async def _build(name: str, cell: Cell, place: Place, folder: Path, threads: int | None) -> None:
    rows, shown = drawn(cell, place)
    parts = folder / "parts" / f"{name}.jsonl"
    parts.parent.mkdir(parents=True, exist_ok=True)
    known = _known(parts)
    combinations = list(itertools.product(*map(range, cell.sizes)))
    missing = [one for one in combinations if one not in known]
    known = {one: known[one] for one in combinations if one in known}
    start, before = time.monotonic(), len(known)
    async with cell.backend(place, threads=threads) as backend:
        with parts.open("a", encoding="utf-8") as out:
            for query, closings, members in _groups(cell, missing, rows, shown, backend):
                answer = await backend.score(query)
                at = {word: index for index, word in enumerate(query.label_words)}
                values = np.array(answer.log_probs).reshape(len(rows), len(closings), -1)
                for one in members:
                    columns = [at[word] for word in cell.words[one[3]]]
                    found = values[:, closings.index(one[2])][:, columns]
                    known[one] = found.tolist()
                    out.write(json.dumps([one, known[one]]) + "\n")
                out.flush()
                took = time.monotonic() - start
                left = (len(combinations) - len(known)) * took / (len(known) - before)
                print(
                    f"{name}: {len(known)}/{len(combinations)} in {took:.0f} s, {left:.0f} s left",
                    flush=True,
                )
        fingerprint = backend.fingerprint
    meta = {
        "cell": name,
        "model": fingerprint,
        "task": cell.task("{closing}"),
        "slots": ["instruction", "demonstrations", "closing", "labels"],
        "instructions": cell.instructions,
        "closings": cell.closings,
        "words": cell.words,
        "labels": cell.labels,
        "date": date.today().isoformat(),
    }
    order = sorted(known)
    temporary = folder / f".{name}.npz"
    np.savez_compressed(
        temporary,
        sizes=np.array(cell.sizes, dtype=np.int64),
        blanks=np.array(cell.blanks, dtype=np.int64),
        prompts=np.array(order, dtype=np.int64),
        log_probs=np.array([known[one] for one in order], dtype=np.float32),
        targets=np.array([cell.labels.index(row["label"]) for row in rows], dtype=np.int64),
        meta=np.array(json.dumps(meta)),
    )
    temporary.rename(folder / f"{name}.npz")


def _known(parts: Path) -> dict[Combination, list[list[float]]]:
    if not parts.is_file():
        return {}
    known = {}
    for line in parts.read_text(encoding="utf-8").splitlines():
        try:
            one, found = json.loads(line)
        except ValueError:  # The last line of an interrupted build.
            continue
        known[tuple(one)] = found
    return known


def _groups(
    cell: Cell,
    missing: Sequence[Combination],
    rows: Sequence[Row],
    shown: dict[str, list[Row]],
    backend: LLMBackend,
) -> Iterator[tuple[Query, list[int], list[Combination]]]:
    """Group queries with the same prefix and the same form of label words.

    A model reuses the prefix that an input shares with the one before it, so the closings of one
    row are consecutive.
    """
    groups: dict[tuple[str, bool], list[Combination]] = defaultdict(list)
    for one in missing:
        # A label word at the beginning of an answer has no leading space.
        groups[cell.prefix(one, shown), not cell.closings[one[2]]].append(one)
    for (prefix, _), members in groups.items():
        closings = sorted({one[2] for one in members})
        words = list(dict.fromkeys(word for one in members for word in cell.words[one[3]]))
        labels = {str(index): word for index, word in enumerate(words)}
        tasks = [
            TaskSpec.model_validate({**cell.task(cell.closings[at]), "labels": labels})
            for at in closings
        ]
        per_task = [query_for(task, prefix, rows, backend=backend).inputs for task in tasks]
        inputs = tuple(itertools.chain.from_iterable(zip(*per_task, strict=True)))
        yield Query(inputs=inputs, label_words=tuple(words)), closings, members
