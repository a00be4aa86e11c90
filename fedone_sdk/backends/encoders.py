"""Encoders, which shorten a rendered input to the model's limit and turn it into token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedone_sdk.backends import chat, tokens
from fedone_sdk.backends.base import Query
from fedone_sdk.backends.tokens import CHARS_PER_TOKEN, Span, load_tokenizer, special_names
from fedone_sdk.errors import BackendError, LabelWordError, SpecError
from fedone_sdk.task import Part, Rendered

__all__ = ["CausalEncoder", "Cloze", "ClozeEncoder", "Encoding", "read_max_length"]


class Cloze(NamedTuple):
    """Token ids of a masked model's input, and the index of the mask among them."""

    ids: list[int]
    mask_index: int


class Encoding(NamedTuple):
    """Token ids of a text, and the characters that each token covers."""

    ids: list[int]
    offsets: list[Span]

    @classmethod
    def spread(cls, text: str, ids: list[int]) -> Encoding:
        """Return an encoding with evenly spread offsets, for a tokeniser that reports none."""
        starts = [index * len(text) // len(ids) for index in range(len(ids))]
        return cls(ids, list(zip(starts, [*starts[1:], len(text)], strict=True)))


class _Encoder:
    # Put before a continuation, because some tokenisers treat the start of a text differently.
    _anchor = ""
    # Whether label words may have several tokens, and advice for the error if they may not.
    _multi_token, _advice = False, ""

    def __init__(self, tokenizer_file: Path, max_length: int) -> None:
        self._tokenizer = load_tokenizer(tokenizer_file)
        self._max_length = max_length
        self._read_special_tokens(tokenizer_file)
        # Tokenises "<mask>" in a user's text as plain text.
        self._tokenizer.encode_special_tokens = True
        # `fit_fields` needs offsets that include spaces. The usual post-processor, which inserts
        # special tokens, is replaced: this class inserts them by their ids.
        from tokenizers.processors import ByteLevel

        self._tokenizer.post_processor = ByteLevel(trim_offsets=False)

    def _read_special_tokens(self, tokenizer_file: Path) -> None:
        """Read the special tokens; called before the post-processor is replaced."""
        raise NotImplementedError

    def special_names(self, text: str) -> list[str]:
        """Return the special tokens in a text."""
        return special_names(self._tokenizer, text)

    def _tokenise(self, text: str) -> Any:
        # `encode_batch` is not faster on short texts, and starts more threads.
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as exc:
            raise BackendError("an input is not valid Unicode (it has a lone surrogate)") from exc

    def _continued(self, text: str) -> Any:
        """Return the tokens of a text that continues another text."""
        if not self._anchor:
            return self._tokenise(text)
        anchor = self._tokenise(self._anchor).ids
        anchored = self._tokenise(self._anchor + text)
        if anchored.ids[: len(anchor)] != anchor:
            raise BackendError(f"cannot tell how {text!r} is tokenised after another text")
        shift = len(self._anchor)
        offsets = [(begin - shift, end - shift) for begin, end in anchored.offsets[len(anchor) :]]
        return Encoding(list(anchored.ids[len(anchor) :]), offsets)

    def continuation(self, text: str) -> list[int]:
        """Return the token ids of a text that continues another text, with its leading space."""
        return list(self._continued(text).ids)

    def spelled(self, label_words: Sequence[str], before: Rendered) -> tuple[str, ...]:
        """Return the label words, with or without a leading space, as they follow an input."""
        return (*label_words,)

    def label_ids(self, label_words: Sequence[str], before: Rendered = ()) -> list[list[int]]:
        """Return the token ids of each label word, as it is spelled after the input `before`."""
        words = self.spelled(label_words, before)
        labels: list[list[int]] = []
        for word in words:
            ids = self.continuation(word)
            if not ids or (len(ids) > 1 and not self._multi_token):
                names = [self._tokenizer.id_to_token(token) for token in ids]
                raise LabelWordError(word, names, self._advice)
            if ids in labels:
                same = f"{words[labels.index(ids)]!r} and {word!r}"
                raise BackendError(f"label words {same} are the same token: choose others")
            labels.append(ids)
        return labels

    def _fitted(self, parts: Rendered, num_extra: int) -> list[int]:
        """Return the token ids of an input, shortened to `max_length - num_extra` tokens."""
        special = [index for index, part in enumerate(parts) if part.kind in ("mask", "special")]
        names = [parts[index].text or "<mask>" for index in special]
        special_ids = [int(self._tokenizer.token_to_id(name)) for name in names]
        before_masks = [at for at, index in enumerate(special) if parts[index].kind == "mask"]
        # The parts between two special tokens are tokenised together: a token may span two parts.
        pairs = pairwise([-1, *special, len(parts)])
        sections = [parts[before + 1 : after] for before, after in pairs]
        encodings: list[Any] = []

        def spans_of(sections: Sequence[Rendered]) -> list[Sequence[Span]]:
            texts = ["".join(part.text for part in section) for section in sections]
            # The mask token removes the space before it, as it did in the model's training.
            for at in before_masks:
                texts[at] = texts[at].rstrip()
            encodings[:] = [self._tokenise(texts[0]), *map(self._continued, texts[1:])]
            return [encoding.offsets for encoding in encodings]

        max_tokens = self._max_length - len(special) - num_extra
        limit = f"the model takes {max_tokens}, besides special tokens and the answer"
        chars = self._max_length * CHARS_PER_TOKEN
        tokens.fit_fields(sections, max_tokens, spans_of, chars=chars, limit=limit)
        ids = list(encodings[0].ids)
        for special_id, encoding in zip(special_ids, encodings[1:], strict=True):
            ids += [special_id, *encoding.ids]
        return ids


class ClozeEncoder(_Encoder):
    """Encodes inputs of masked language models of the RoBERTa family.

    If an input is too long, the ends of its text fields are cut, the longest field first. Names of
    special tokens in a text are tokenised as plain text.
    """

    pad_id: int

    def _read_special_tokens(self, tokenizer_file: Path) -> None:
        special = [self._tokenizer.token_to_id(name) for name in ("<s>", "<pad>", "</s>", "<mask>")]
        if None in special:
            raise BackendError(f"{tokenizer_file}: needs the tokens <s>, <pad>, </s> and <mask>")
        self._start, self.pad_id, self._end, self._mask = special

    def encode(self, parts: Rendered) -> Cloze:
        """Tokenise an input, and shorten its fields until it fits."""
        chat.refuse_chat(parts)
        num_masks = sum(part.kind == "mask" for part in parts)
        if num_masks != 1:
            raise BackendError(
                f"the template needs {{mask}} exactly once for a masked language model; "
                f"this input has it {num_masks} times"
            )
        ids = [self._start, *self._fitted(parts, 2), self._end]
        return Cloze(ids, ids.index(self._mask))


class CausalEncoder(_Encoder):
    """Encodes inputs of causal language models, which answer at the end.

    An input is shortened as in `ClozeEncoder`. A chat is put into its frame, the text of the chat
    template around messages. Other inputs begin with the tokeniser's start tokens, if any.
    """

    frames: dict[tuple[str, ...], chat.ChatFrame]  # The keys are the roles of the messages.
    _advice = "set multi_token_labels: true"

    def __init__(
        self,
        tokenizer_file: Path,
        max_length: int,
        apply_template: chat.ApplyTemplate | None = None,
        *,
        start: list[int] | None = None,
        multi_token_labels: bool = False,
    ) -> None:
        super().__init__(tokenizer_file, max_length)
        self._multi_token = multi_token_labels
        if start is not None:
            self._start = start
        self._apply_template = apply_template
        self.frames = {}

    def _read_special_tokens(self, tokenizer_file: Path) -> None:
        def ids(text: str, *, special: bool = False) -> list[int]:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

        # The start tokens are the special tokens that the tokeniser puts before a text.
        plain, framed = ids("a"), ids("a", special=True)
        starts = [at for at in range(len(framed)) if framed[at : at + len(plain)] == plain]
        if not plain or not starts:
            raise BackendError(f"{tokenizer_file}: cannot tell which special tokens start a text")
        self._start = framed[: starts[0]]
        # Some tokenisers (SentencePiece) put a space before every text, but not after a line break.
        self._anchor = "" if ids("\na") == ids("\n") + plain else "\n"

    def split_special(self, piece: str) -> Rendered:
        """Split a piece of a frame into its special tokens and other text."""
        names = sorted(self.special_names(piece), key=len, reverse=True)
        texts = re.split(f"({'|'.join(map(re.escape, names))})", piece) if names else [piece]
        kinds: cycle[Literal["text", "special"]] = cycle(("text", "special"))
        return tuple(Part(kind, text) for kind, text in zip(kinds, texts, strict=False) if text)

    def frame(self, roles: tuple[str, ...]) -> chat.ChatFrame:
        """Return the frame of the model's chat template for messages of these roles."""
        if roles not in self.frames:
            if self._apply_template is None:
                raise BackendError(
                    "the task is a chat, but the model has no chat template: "
                    "write the task as a template, or use an instruct model"
                )
            bare, spaced = map(self._apply_template, chat.placeholder_chats(roles))
            self.frames[roles] = chat.chat_frame(roles, bare, spaced, self.split_special)
        return self.frames[roles]

    def framed(self, parts: Rendered) -> Rendered:
        """Return a chat in the frame of the model's template; other inputs are unchanged."""
        if not chat.is_chat(parts):
            return parts
        messages = chat.messages_of(parts)
        frame = self.frame(tuple(message.role for message in messages))
        framed: list[Part] = []
        for piece, strips, message in zip(frame.pieces, frame.strips, messages, strict=False):
            framed += [*piece, *chat.unpadded(message.parts, strips)]
        return (*framed, *frame.pieces[-1])

    def spelled(self, label_words: Sequence[str], before: Rendered) -> tuple[str, ...]:
        """Return the label words, with or without a leading space, as they follow an input."""
        if not chat.is_chat(before):
            return (*label_words,)
        return chat.answer_words(label_words, self.framed(before))

    def endings(self, query: Query) -> list[list[list[int]]]:
        """Return per input the token ids of the texts to score: label words or a reference."""
        if query.want != "reference":
            return [self.label_ids(query.label_words, query.inputs[0])] * len(query.inputs)
        endings = [[self.continuation(text)] for text in query.references]
        for ((*ids,),) in endings:
            if not 0 < len(ids) < self._max_length - 1:
                raise BackendError(
                    f"a reference text has {len(ids)} tokens; it must have 1 to "
                    f"{self._max_length - 2} for this model"
                )
        return endings

    def encode_for_text(self, query: Query) -> list[list[int]]:
        """Return the token ids of each input, shortened to leave room for the generated text."""
        if not 0 < query.max_tokens < self._max_length:
            raise BackendError(
                f"max_tokens must be from 1 to {self._max_length - 1} for this model, "
                f"not {query.max_tokens}"
            )
        return [self.encode(parts, reserve=query.max_tokens) for parts in query.inputs]

    def encode(self, parts: Rendered, *, reserve: int = 0) -> list[int]:
        """Tokenise an input, and shorten its fields until the input plus `reserve` tokens fit."""
        chat.refuse_mask(parts)
        # The frame of a chat includes the start token, if the model has one.
        start = [] if chat.is_chat(parts) else self._start
        ids = self._fitted(self.framed(parts), len(start) + reserve)
        if not start and not ids:
            raise BackendError("an input is empty, and this model has no token that starts a text")
        return [*start, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def read_max_length(folder: Path, *, causal: bool = False) -> int:
    """Return the maximum number of tokens per input, from the files of a model."""
    limits: list[int] = []
    stated = read_json(folder / "tokenizer_config.json").get("model_max_length")
    if isinstance(stated, int) and stated < 2**31:  # transformers writes 1e30 for "unknown"
        limits.append(stated)
    config = read_json(folder / "config.json")
    positions = config.get("max_position_embeddings", config.get("n_positions"))  # GPT-2's name
    if isinstance(positions, int):
        # RoBERTa numbers positions from pad_token_id + 1.
        limits.append(positions if causal else positions - config.get("pad_token_id", 1) - 1)
    if not limits:
        raise SpecError(
            "the maximum length is unknown: needs tokenizer_config.json with model_max_length, "
            "or config.json with max_position_embeddings",
            source=str(folder),
        )
    return min(limits)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as exc:
        raise SpecError(f"is not JSON: {exc}", source=str(file)) from exc
    return content if isinstance(content, dict) else {}
