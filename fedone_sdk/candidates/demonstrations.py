"""Demonstrations: blocks of solved examples in the form of the task's template."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field

from fedone_sdk._values import Frozen
from fedone_sdk.candidates.placeholders import label_placeholder
from fedone_sdk.data.draws import SplitMix64
from fedone_sdk.data.row_checks import field_problem, label_problem
from fedone_sdk.errors import DataError, SpecError
from fedone_sdk.task import Example, TaskSpec, answer_word, label_index, pieces_of
from fedone_sdk.vocabulary import MAX_CANDIDATE_CHARS, special_token

_TRIES = 50
"""Maximum number of draws until a block differs from the others."""

LONG_SHOT = 300
"""Examples (shots) with more characters are used only if a class has too few shorter examples."""

_TEXTS = ""
"""Key of the single pool if examples have reference texts in place of labels."""


def _unique(shots: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(shots)) < len(shots):
        raise ValueError("a number of shots is repeated")
    return shots


class DemonstrationsSource(Frozen):
    """Blocks of solved examples from a public labelled file.

    The examples are sent to every device and shown to the model as part of the prompt.

    Attributes:
        file: A labelled file in one of the formats that `fedone_sdk.data.load_examples` reads. A
            relative path is relative to the run file's folder.
        shots: Examples per block; 0 is the blank candidate.
        blocks: Number of blocks for each number of shots; fewer if the file does not have enough
            rows for that many different blocks.
    """

    kind: Literal["demonstrations"] = "demonstrations"
    file: Annotated[str, Field(min_length=1)]
    shots: Annotated[
        tuple[Annotated[int, Field(ge=0, le=64)], ...],
        Field(min_length=1, max_length=16),
        AfterValidator(_unique),
    ] = (0, 2, 4)
    blocks: Annotated[int, Field(ge=1, le=1024)] = 4


def demonstration_candidates(
    task: TaskSpec,
    slot_name: str,
    examples: Iterable[Example],
    *,
    slots: Collection[str] = (),
    shots: Sequence[int] = (0, 2, 4),
    blocks: int = 4,
) -> tuple[str, ...]:
    """Return blocks of solved examples from public rows.

    A shot (a solved example) is the part of the template after ``{slot_name}`` (or ``{prompt}``),
    filled with the texts of an example:

    - The placeholder of the label word replaces ``{mask}``, or is appended without a ``{mask}``.
      In a task without labels, the reference text takes the place of this placeholder.
    - In a chat, a shot also has the messages after the slot's message, each on its own line.
    - Names of other slots stay as placeholders, which `placeholders.fill` replaces.

    A shot ends with a line feed, or with a blank line if a shot of the block has several lines.
    Classes alternate within a block; every second block reverses the order of the block before.
    Rows that contain a placeholder or a model's special token are skipped.

    Args:
        task: Supplies the template, and the label values or the column of reference texts.
        slot_name: The slot of the candidates.
        examples: Public labelled rows.
        slots: Names of the slots in the task's template; other names in it are columns.
        shots: Examples per block; 0 is the blank candidate.
        blocks: Number of blocks for each number of shots; fewer if there are not enough rows for
            that many different blocks.

    Returns:
        Unique blocks of at most `MAX_CANDIDATE_CHARS`: the blank one first, the others in the
        order of `shots`.

    Raises:
        SpecError: The template has no place for demonstrations, or has a text field before it.
        DataError: A row is invalid, a class has too few rows, or all blocks are too long.
    """
    form = _Form.of(task, slot_name, frozenset(slots))
    pools = _pools(task, form, examples)
    most = max(shots, default=0)
    need = -(-most // len(pools))
    if lacking := [f"{label} has {len(pool)}" for label, pool in pools.items() if len(pool) < need]:
        each = " of each class; class " if task.labels else "; the file"
        raise DataError(
            f"{slot_name}: {most} shots need {need} different rows{each}{', class '.join(lacking)}"
        )
    candidates = [""] if 0 in shots else []
    for count in filter(None, shots):
        stream = SplitMix64((SplitMix64(0).next_u64() + count) % 2**53)
        preferred = {
            label: _preferred(pool, -(-count // len(pools))) for label, pool in pools.items()
        }
        candidates += _blocks(slot_name, preferred, count, blocks, stream)
    return tuple(candidates)


class _Form(NamedTuple):
    """The part of a template that a shot fills."""

    pieces: list[tuple[str, str | None, int | None]]  # As `pieces_of` returns them.
    fields: tuple[str, ...]  # Names of the pieces that are columns of the data.
    slots: frozenset[str]  # Names of the pieces that are other slots.

    @classmethod
    def of(cls, task: TaskSpec, slot_name: str, slots: frozenset[str]) -> _Form:
        messages = [list(pieces_of(template)) for _, template in task.messages]
        names = [{name for _, name, _ in pieces} for pieces in messages]
        mark = slot_name if any(slot_name in each for each in names) else "prompt"
        first = next((index for index, each in enumerate(names) if mark in each), None)
        if first is None:
            raise SpecError(f"task: has neither {{{slot_name}}} nor {{prompt}}")
        begin = next(i for i, (_, name, _) in enumerate(messages[first]) if name == mark) + 1
        *inputs, answer = [messages[first][begin:], *messages[first + 1 :]]
        # Each message is on its own line. Inputs without text or fields are left out.
        lines = [part for part in inputs if any(text.strip() or name for text, name, _ in part)]
        lines.append(answer)
        pieces = [piece for line in lines for piece in [("\n", None, None), *line]][1:]
        no_fields = {None, mark, "prompt", "mask", *slots}
        fields = tuple(
            dict.fromkeys(name for _, name, _ in pieces if name and name not in no_fields)
        )
        missing = set().union(*names) - no_fields - set(fields)
        if "mask" in set().union(*names) - {name for _, name, _ in pieces}:
            missing.add("mask")
        if missing or not fields:
            which = ", ".join(f"{{{name}}}" for name in sorted(filter(None, missing)))
            raise SpecError(
                f"task: {which or 'a text field'} must follow {{{mark}}}, "
                "the place of the demonstrations"
            )
        return cls(pieces, fields, slots - {slot_name})

    def shot(self, example: Example, answer: str, *, is_text: bool) -> str:
        written: list[str] = []
        answered = False
        for text, name, max_chars in self.pieces:
            written.append(text)
            if name == "mask":
                written.append(answer)
                answered = True
            elif name in self.slots:
                written.append(f"{{{name}}}")
            elif name in self.fields:
                written.append(example[name][:max_chars])
        if not answered:
            written.append(answer_word(answer, "".join(written)) if is_text else answer)
        return "".join(written).rstrip("\n")


def _pools(task: TaskSpec, form: _Form, examples: Iterable[Example]) -> dict[str, list[str]]:
    labels = list(task.labels) or [_TEXTS]
    texts_of = (*form.fields, task.label_field) if task.generates else form.fields
    pools: dict[str, dict[str, None]] = {label: {} for label in labels}
    reserved = [f"{{{name}}}" for name in form.slots]
    reserved += map(label_placeholder, task.labels)
    # A demonstration needs a reference text even if the score function does not.
    strict = task.model_copy(update={"loss": "nll"}) if task.generates else task
    for number, example in enumerate(examples, 1):
        problems = (field_problem(example, field) for field in form.fields)
        if problem := next(filter(None, problems), label_problem(strict, example)):
            raise DataError(f"row {number}: {problem}")
        value = example[task.label_field]
        label = labels[0 if task.generates else label_index(task, value) or 0]
        texts = [example[field] for field in texts_of]
        if not any(special_token(text) or any(mark in text for mark in reserved) for text in texts):
            answer = value if task.generates else label_placeholder(label)
            pools[label][form.shot(example, answer, is_text=task.generates)] = None
    return {label: list(shots) for label, shots in pools.items()}


def _preferred(pool: Sequence[str], need: int) -> list[str]:
    short = [shot for shot in pool if len(shot) <= LONG_SHOT]
    return short if len(short) >= need else sorted(pool, key=len)[:need]


def _blocks(
    slot_name: str, pools: dict[str, list[str]], count: int, blocks: int, stream: SplitMix64
) -> list[str]:
    unique: dict[str, None] = {}
    shortest = 0
    decks = {label: _endless(pool, stream) for label, pool in pools.items()}
    order: list[str] = []
    for number in range(blocks):
        order = order[::-1] if number % 2 else stream.shuffle(list(pools))
        for _ in range(_TRIES):
            drawn: list[str] = []
            for label in islice(cycle(order), count):
                drawn.append(next(shot for shot in decks[label] if shot not in drawn))
            block = _joined(drawn)
            if len(block) > MAX_CANDIDATE_CHARS:
                shortest = min(shortest or len(block), len(block))
            elif block not in unique:
                unique[block] = None
                break
    if not unique:
        raise DataError(
            f"{slot_name}: a block of {count} shots takes {shortest} characters or more, but a "
            f"candidate has at most {MAX_CANDIDATE_CHARS}; use fewer shots or shorter rows"
        )
    return list(unique)


def _endless(pool: Sequence[str], stream: SplitMix64) -> Iterator[str]:
    while True:
        yield from stream.shuffle(pool)


def _joined(shots: Sequence[str]) -> str:
    separator = "\n\n" if any("\n" in shot for shot in shots) else "\n"
    return "".join(shot + separator for shot in shots)
