"""The examples of one step that may leave the device."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.data.misfit import misfit_of
from fedone_sdk.errors import FedOneError
from fedone_sdk.messages import MAX_TEXT_CHARS, MIN_SCORED_SHARE, Scored
from fedone_sdk.task import Example, TaskSpec, references_of

__all__ = ["BeforeSend", "Declining", "Minibatch", "Unfit", "usable"]

_log = structlog.get_logger(__name__)

BeforeSend = Callable[[str], "str | Awaitable[str | None] | None"]
"""Sees every text before it leaves the device; returns it, a redacted form, or None to veto.
One that fails vetoes."""


class Declining(FedOneError):
    """The work cannot be done well enough to be worth sending."""

    def __init__(self, reason: str, usage: Usage = NOTHING) -> None:
        self.reason, self.usage = reason, usage
        super().__init__(reason)


class Unfit(Declining):
    """The device fits no work of the run, whichever mini-batch it would draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """The examples of one step that may leave the device.

    Attributes:
        texts: Text fields of each, after the hook.
        references: Reference text of each, after the hook, for loss ``nll``; else none.
        examples: The same examples whole; their labels stay on the device when the gateway scores.
        vetoed: Examples that the hook held back, or left without a text that can be sent.
    """

    texts: tuple[dict[str, str], ...]
    references: tuple[str, ...]
    examples: tuple[Example, ...]
    vetoed: int

    @classmethod
    async def of(
        cls, task: TaskSpec, examples: Sequence[Example], before_send: BeforeSend | None
    ) -> Minibatch:
        """Applies the hook to the examples of a step.

        Raises:
            Declining: The hook held too many back.
        """
        # What the model must see passes the hook: for a reference text that is the label too.
        names = (*task.fields, task.label_field) if task.loss == "nll" else task.fields
        texts, kept_examples = [], []
        for example in examples:
            kept = dict(example)
            if before_send is not None:
                kept |= {name: await _passed(before_send, example[name]) for name in names}
            if usable(task, kept):
                texts.append({name: kept[name] for name in task.fields})
                kept_examples.append(kept)
        batch = cls(
            texts=tuple(texts),
            references=references_of(task, kept_examples),
            examples=tuple(kept_examples),
            vetoed=len(examples) - len(texts),
        )
        batch.check(frozenset(), NOTHING)
        return batch

    @property
    def sha256(self) -> str:
        """Names texts and labels, so that what is known of other ones is not taken for theirs."""
        content = [self.texts, self.examples]
        try:
            text = json.dumps(content, sort_keys=True, default=repr, ensure_ascii=False)
        except (TypeError, ValueError):
            # Keys that are no text, as csv.DictReader makes them, or a row that holds itself.
            text = repr(content)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def check(self, failed: frozenset[int], usage: Usage) -> Scored:
        """Counts what became of the examples.

        Raises:
            Declining: Too few were scored.
        """
        total = len(self.texts) + self.vetoed
        scored = len(self.texts) - len(failed)
        if not scored or scored < MIN_SCORED_SHARE * total:
            raise Declining(
                f"only {scored} of {total} examples could be scored "
                f"({len(failed)} failed, {self.vetoed} vetoed)",
                usage,
            )
        return Scored(scored=scored, failed=len(failed), vetoed=self.vetoed)


async def _passed(before_send: BeforeSend, text: Any) -> str | None:
    try:
        result = before_send(text)
        passed = await result if inspect.isawaitable(result) else result
    except Exception as exc:
        # Only the kind: what an app's function says may quote private text.
        _log.warning("before_send failed", error=type(exc).__name__)
        return None
    if passed is None or _fits(passed):
        return passed
    # One text that no message can carry must not end the client.
    _log.warning("before_send gave no text that can be sent", kind=type(passed).__name__)
    return None


def usable(task: TaskSpec, example: Mapping[str, Any]) -> bool:
    """Whether an example has the task's text fields, fit to be sent, and what its loss needs."""
    return misfit_of(task, example, most_chars=MAX_TEXT_CHARS) is None


def _fits(text: object) -> bool:
    """Whether a message can carry a text: not too long, and no half of a character in it."""
    if not isinstance(text, str) or len(text) > MAX_TEXT_CHARS:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
