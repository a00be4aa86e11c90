"""Frames of chat templates.

A chat template turns messages into one text. This module applies the template to placeholders. The
text around the placeholders is the frame, into which the contents of messages are inserted. Special
tokens therefore come only from the frame, and never from the contents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from fedone_sdk.errors import BackendError
from fedone_sdk.task import Rendered, answer_word

_log = structlog.get_logger(__name__)

ApplyTemplate = Callable[[list[dict[str, str]]], str]
"""Applies a model's chat template to messages (``role``, ``content``), and returns the text.

If the last message is the user's, the text ends where the answer begins. If the last message is the
assistant's, this message is the beginning of the answer, and the text ends with it.

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
    """The parts of a chat template around the contents of messages."""

    pieces: tuple[Rendered, ...]  # The text before each content, and after the last content.
    strips: tuple[tuple[bool, bool], ...]  # Whether each content's start and end are stripped.


def is_chat(parts: Rendered) -> bool:
    """Whether a rendered input is a chat."""
    return bool(parts) and parts[0].kind == "role"


def refuse_chat(parts: Rendered) -> None:
    """Raise an error if an input is a chat; called for masked models."""
    if is_chat(parts):
        raise BackendError(
            "the task is a chat, which this model does not support: a masked model answers at "
            "{mask}, so write the task as a template"
        )


def refuse_mask(parts: Rendered) -> None:
    """Raise an error if an input has a mask; called for models that answer at the end."""
    if any(part.kind == "mask" for part in parts):
        raise BackendError(
            "the template has {mask}, but this model answers at the end: remove {mask} and the "
            "text after it from the template"
        )


def messages_of(parts: Rendered) -> list[Message]:
    """Return the messages of a rendered chat.

    An empty system message is left out, so that the template inserts its default. An empty last
    message of the assistant is left out too, because the template adds the start of the answer.
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


def placeholder_chats(roles: Sequence[str]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return two chats of placeholders; in the second, spaces surround each placeholder."""
    pairs = [*zip(roles, _placeholders(roles), strict=True)]
    bare = [{"role": role, "content": name} for role, name in pairs]
    return bare, [{"role": role, "content": f" {name} "} for role, name in pairs]


def chat_frame(
    roles: Sequence[str], bare: str, spaced: str, split: Callable[[str], Rendered]
) -> ChatFrame:
    """Return the frame that a chat template makes for messages of these roles.

    `bare` and `spaced` are what the template makes of the two chats of `placeholder_chats`. `split`
    splits a text into special tokens and other text.
    """
    names = _placeholders(roles)
    pieces, spaced_pieces = _pieces(bare, names), _pieces(spaced, names)
    strips = tuple(
        (not spaced_pieces[at].endswith(f"{pieces[at]} "), spaced_pieces[at + 1][:1] != " ")
        for at in range(len(names))
    )
    return ChatFrame(tuple(map(split, pieces)), strips)


def _placeholders(roles: Sequence[str]) -> list[str]:
    return [f"@@{role}-{number}@@" for number, role in enumerate(roles)]


def _pieces(text: str, names: Sequence[str]) -> list[str]:
    pieces, remaining = [], text
    for name in names:
        before, mark, remaining = remaining.partition(name)
        if not mark or name in remaining:
            raise BackendError(
                "the model's chat template repeats, drops or moves a message of the role "
                f"{name.strip('@').partition('-')[0]!r}: write the task with other roles"
            )
        pieces.append(before)
    return [*pieces, remaining]


def unpadded(parts: Rendered, ends: tuple[bool, bool]) -> Rendered:
    """Return a message's content without the white space that the template strips at its ends."""
    kept = list(parts)
    for is_stripped, indices, strip in (
        (ends[0], range(len(kept)), str.lstrip),
        (ends[1], reversed(range(len(kept))), str.rstrip),
    ):
        for index in indices if is_stripped else ():
            kept[index] = kept[index]._replace(text=strip(kept[index].text))
            if kept[index].text:
                break
    return tuple(kept)


def answer_words(words: Sequence[str], framed: Rendered) -> tuple[str, ...]:
    """Return the label words, with or without a leading space, as they follow a framed input."""
    before = ""
    for part in reversed(framed):
        if part.kind == "special" or part.text:
            # The text of a field differs in each row, so "." stands for it.
            before = {"special": "", "field": "."}.get(part.kind, part.text)
            break
    return tuple(answer_word(word, before) for word in words)


def warn_of_raw_template(model: str) -> None:
    """Log that a task for an instruct model does not use the model's chat template."""
    _log.warning(
        "raw_template_on_chat_model",
        model=model,
        effect="the model was trained on its chat template, and answers worse without it",
        change="write the task as chat: {user: ...}",
    )
