"""Frames of chat templates.

A chat template turns messages into one text. Here it is applied to placeholders once; the text
around them is the frame. Contents of messages are then inserted into the frame, so that they pass
neither through the template nor through a tokeniser that parses special tokens. Special tokens
come only from the frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from fedone_sdk.errors import BackendError
from fedone_sdk.task import Rendered, answer_word

_log = structlog.get_logger(__name__)

MASKED = "a masked model answers at {mask}, so write the task as a template"
"""Error text for chats on a masked model."""

ApplyTemplate = Callable[[list[dict[str, str]]], str]
"""Applies a model's chat template to messages (``role``, ``content``), and returns the text.

After a last message of the user the text opens the answer. A last message of the assistant is the
beginning of the answer, so nothing follows it.

Raises:
    BackendError: The template refuses the messages.
"""


class Message(NamedTuple):
    """A message of a rendered chat."""

    role: str
    parts: Rendered

    @property
    def text(self) -> str:
        """The content as one text."""
        return "".join(part.text for part in self.parts)


class ChatFrame(NamedTuple):
    """The parts of a chat template around the contents of messages.

    Attributes:
        pieces: The parts before each content and after the last one, of kinds ``text`` and
            ``special``.
        strips: Per content, whether the template strips white space at its two ends.
    """

    pieces: tuple[Rendered, ...]
    strips: tuple[tuple[bool, bool], ...]


def is_chat(parts: Rendered) -> bool:
    """Whether a rendered input is a chat."""
    return bool(parts) and parts[0].kind == "role"


def refuse_chat(parts: Rendered, instead: str) -> None:
    """Raise an error with the advice `instead` if an input is a chat."""
    if is_chat(parts):
        raise BackendError(f"the task is a chat, which this model does not take: {instead}")


def refuse_mask(parts: Rendered) -> None:
    """Raise an error if an input has a mask, for models that answer at the end."""
    if any(part.kind == "mask" for part in parts):
        raise BackendError(
            "the template has {mask}, but this model answers at the end: take {mask} and what "
            "follows it out of the template"
        )


def messages_of(parts: Rendered) -> list[Message]:
    """Return the messages of a rendered chat.

    A system message without content is left out: the default of the model's template takes its
    place. So is an empty last message of the assistant: the template opens the answer.
    """
    messages: list[Message] = []
    for part in parts:
        if part.kind == "role":
            messages.append(Message(part.text, ()))
        else:
            messages[-1] = messages[-1]._replace(parts=(*messages[-1].parts, part))
    if messages[0].role == "system" and not messages[0].text:
        del messages[0]
    if messages[-1].role == "assistant" and not messages[-1].text:
        del messages[-1]
    return messages


def probes(roles: Sequence[str]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return placeholder messages of these roles, from which `chat_frame` reads the frame."""
    pairs = [*zip(roles, _names(roles), strict=True)]
    bare = [{"role": role, "content": name} for role, name in pairs]
    return bare, [{"role": role, "content": f" {name} "} for role, name in pairs]


def chat_frame(
    roles: Sequence[str], bare: str, spaced: str, cut: Callable[[str], Rendered]
) -> ChatFrame:
    """Return the frame that a chat template makes for messages of these roles."""
    names = _names(roles)
    pieces, wider = _pieces(bare, names), _pieces(spaced, names)
    strips = tuple(
        (not wider[at].endswith(f"{pieces[at]} "), not wider[at + 1].startswith(" "))
        for at in range(len(names))
    )
    return ChatFrame(tuple(map(cut, pieces)), strips)


def _names(roles: Sequence[str]) -> list[str]:
    return [f"@@{role}-{number}@@" for number, role in enumerate(roles)]


def _pieces(text: str, names: Sequence[str]) -> list[str]:
    pieces, rest = [], text
    for name in names:
        before, mark, rest = rest.partition(name)
        if not mark or name in rest:
            raise BackendError(
                f"the model's chat template does not show a message of the role "
                f"{name.strip('@').partition('-')[0]!r} once and in its place: "
                "write the task with other roles"
            )
        pieces.append(before)
    return [*pieces, rest]


def unpadded(parts: Rendered, ends: tuple[bool, bool]) -> Rendered:
    """Return a content without the white space at its ends that the template strips."""
    kept = list(parts)
    for strips, order, cut in (
        (ends[0], range(len(kept)), str.lstrip),
        (ends[1], reversed(range(len(kept))), str.rstrip),
    ):
        for at in order if strips else ():
            kept[at] = kept[at]._replace(text=cut(kept[at].text))
            if kept[at].text:
                break
    return tuple(kept)


def answer_words(words: Sequence[str], framed: Rendered) -> tuple[str, ...]:
    """Label words as the answer to an input spells them: see `fedone_sdk.task.answer_word`.

    The input is within its frame, whose special tokens are parts of their own.
    """
    before = ""
    for part in reversed(framed):
        if part.kind == "special" or part.text:
            # A field differs from row to row, and all rows have the same label words.
            before = {"special": "", "field": "."}.get(part.kind, part.text)
            break
    return tuple(answer_word(word, before) for word in words)


class TemplateWarning:
    """Warns once if an instruct model is used without its chat template."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._given = False

    def check(self, form: Rendered) -> None:
        """Check the form of the task."""
        if form and not is_chat(form) and not self._given:
            self._given = True
            _log.warning(
                "raw_template_on_chat_model",
                model=self._model,
                effect="the model was trained on its chat template, and answers worse without it",
                change="write the task as chat: {user: ...}",
            )
