"""Sources of a slot's candidates, as sections of a run file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue

from fedone_sdk._values import Frozen
from fedone_sdk.task import LabelValue


class InstructionsSource(Frozen):
    """Texts that the SDK writes for a task.

    Attributes:
        kind: ``instructions`` ship with the SDK, and are filled from the task's description.
            ``codes`` say by the label values what each label word stands for, for label words that
            are codes, such as `` A``, `` B``.
        size: The largest number of candidates, including a blank; null uses all. The first ones
            differ most from each other.
    """

    kind: Literal["instructions", "codes"] = "instructions"
    size: Annotated[int, Field(ge=2)] | None = None


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
        blocks: Different blocks for each number of shots; fewer if the file does not have enough
            rows.
    """

    kind: Literal["demonstrations"] = "demonstrations"
    file: Annotated[str, Field(min_length=1)]
    shots: Annotated[
        tuple[Annotated[int, Field(ge=0, le=64)], ...],
        Field(min_length=1, max_length=16),
        AfterValidator(_unique),
    ] = (0, 2, 4)
    blocks: Annotated[int, Field(ge=1, le=1024)] = 4


class OwnSource(Frozen):
    """A function of your own, which returns the candidates.

    Attributes:
        object: ``package.module:function``, also from a module next to the run file, or the name
            of an entry point of the group ``fedone.candidates``. It is called with ``task``, with
            ``texts`` (the training texts, where they are at hand) and the options.
        options: Its other keyword arguments.
    """

    kind: Literal["own"] = "own"
    object: Annotated[str, Field(min_length=1, max_length=200)]
    options: dict[str, JsonValue] = Field(default_factory=dict)


LabelSet = dict[LabelValue, str] | tuple[str, ...]
"""One label word per class: by label value, or in the task's label order."""


class LabelsSource(Frozen):
    """Sets of label words, including the task's own; for the reserved slot ``labels``.

    Attributes:
        sets: The other sets, used verbatim. If empty, the shipped sets for the task's own words are
            used.
    """

    kind: Literal["labels"] = "labels"
    sets: Annotated[tuple[LabelSet, ...], Field(max_length=1024)] = ()
