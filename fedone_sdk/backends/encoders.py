"""Encoders of rendered inputs: token ids, truncated to a model's maximum length."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedone_sdk.backends import chat
from fedone_sdk.backends.base import Query
from fedone_sdk.backends.tokens import CHARS_PER_TOKEN, Span, fit, load_tokenizer, special_names
from fedone_sdk.errors import BackendError, LabelWordError, SpecError
from fedone_sdk.task import Part, Rendered

__all__ = ["CausalEncoder", "Cloze", "ClozeEncoder", "Encoding", "read_max_length"]


class Cloze(NamedTuple):
    """Token ids of a masked model's input, and the mask's place."""

    ids: list[int]
    mask_index: int


class Encoding(NamedTuple):
    """Token ids of a text, and the characters that each token covers."""

    ids: list[int]
    offsets: list[Span]

    @classmethod
    def spread(cls, text: str, ids: list[int]) -> Encoding:
        """Return the encoding of a tokeniser that does not show which characters a token covers.

        Offsets are spread evenly. That suffices for truncation, which measures the result again.
        """
        borders = [index * len(text) // len(ids) for index in range(len(ids))]
        return cls(ids, list(zip(borders, [*borders[1:], len(text)], strict=True)))


class _Encoder:
    # Text before a continuation, for tokenisers that tokenise the start of a text differently.
    _anchor = ""
    # Whether label words may have several tokens, and what allows them.
    _several, _way_out = False, ""

    def __init__(self, tokenizer_file: Path, max_length: int) -> None:
        self._tokenizer = load_tokenizer(tokenizer_file)
        self._max_length = max_length
        self._place_special_tokens(tokenizer_file)
        # "<mask>" in a user's text is plain text.
        self._tokenizer.encode_special_tokens = True
        # Special tokens are placed here by id; what is left to post-process is that offsets must
        # cover the spaces too, for cutting.
        from tokenizers.processors import ByteLevel

        self._tokenizer.post_processor = ByteLevel(trim_offsets=False)

    def _place_special_tokens(self, tokenizer_file: Path) -> None:
        """Read the special tokens while the tokeniser still inserts them."""
        raise NotImplementedError

    def special_names(self, text: str) -> list[str]:
        """Return the special tokens that a text, or a piece of a frame, contains."""
        return special_names(self._tokenizer, text)

    def _tokenise(self, text: str) -> Any:
        # Text by text: `encode_batch` is no faster on short texts, and starts a thread pool of its
        # own that ignores the backend's.
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as exc:
            raise BackendError("an input is not valid Unicode (it has a lone surrogate)") from exc

    def _continued(self, text: str) -> Any:
        """Return the tokens of a text that continues another one."""
        if not self._anchor:
            return self._tokenise(text)
        anchor = self._tokenise(self._anchor).ids
        whole = self._tokenise(self._anchor + text)
        if whole.ids[: len(anchor)] != anchor:
            raise BackendError(f"cannot tell how {text!r} is tokenised after another text")
        offsets = whole.offsets[len(anchor) :]
        shift = len(self._anchor)
        return Encoding(
            list(whole.ids[len(anchor) :]), [(begin - shift, end - shift) for begin, end in offsets]
        )

    def continuation(self, text: str) -> list[int]:
        """Return the token ids of a text that continues another one; its leading space is kept."""
        return list(self._continued(text).ids)

    def spelled(self, label_words: Sequence[str], like: Rendered) -> tuple[str, ...]:
        """Return the label words as the answer to an input, or to the task's form, spells them."""
        return (*label_words,)

    def label_ids(self, label_words: Sequence[str], like: Rendered = ()) -> list[list[int]]:
        """Return the token ids of each label word, in its spelling after an input (`spelled`)."""
        words = self.spelled(label_words, like)
        labels: list[list[int]] = []
        for word in words:
            ids = self.continuation(word)
            if not ids or (len(ids) > 1 and not self._several):
                names = [self._tokenizer.id_to_token(token) for token in ids]
                raise LabelWordError(word, names, self._way_out)
            if ids in labels:
                same = f"{words[labels.index(ids)]!r} and {word!r}"
                raise BackendError(f"label words {same} are the same token: choose others")
            labels.append(ids)
        return labels

    def _fitted(self, parts: Rendered, num_extra: int) -> list[int]:
        """Return the token ids of a rendered input, truncated to max_length - `num_extra`."""
        borders = [index for index, part in enumerate(parts) if part.kind in ("mask", "special")]
        names = [parts[index].text or "<mask>" for index in borders]
        placed = [int(self._tokenizer.token_to_id(name)) for name in names]
        masks = [side for side, index in enumerate(borders) if parts[index].kind == "mask"]
        # Each side of a border is one text: tokens may span two parts.
        pairs = pairwise([-1, *borders, len(parts)])
        sides = [parts[before + 1 : border] for before, border in pairs]
        encodings: list[Any] = []

        def offsets(sides: Sequence[Rendered]) -> list[Sequence[Span]]:
            texts = ["".join(part.text for part in side) for side in sides]
            # <mask> swallows the space before it (`lstrip`), as it did in the model's training.
            for side in masks:
                texts[side] = texts[side].rstrip()
            encodings[:] = [self._tokenise(texts[0]), *map(self._continued, texts[1:])]
            return [encoding.offsets for encoding in encodings]

        most = self._max_length - len(placed) - num_extra
        limit = f"the model takes {most} besides special tokens and the answer"
        fit(sides, most, offsets, chars=self._max_length * CHARS_PER_TOKEN, limit=limit)
        ids = list(encodings[0].ids)
        for between, encoding in zip(placed, encodings[1:], strict=True):
            ids += [between, *encoding.ids]
        return ids


class ClozeEncoder(_Encoder):
    """Inputs of masked language models of the RoBERTa family.

    The text fields of an input that is too long are truncated at their ends, the longest first;
    prompt, template text and mask are not. Special tokens in a text are plain text.
    """

    pad_id: int

    def _place_special_tokens(self, tokenizer_file: Path) -> None:
        special = [self._tokenizer.token_to_id(name) for name in ("<s>", "<pad>", "</s>", "<mask>")]
        if None in special:
            raise BackendError(f"{tokenizer_file}: needs the tokens <s>, <pad>, </s> and <mask>")
        self._start, self.pad_id, self._end, self._mask = special

    def encode(self, parts: Rendered) -> Cloze:
        """Tokenises an input, and shortens its fields until it fits."""
        chat.refuse_chat(parts, chat.MASKED)
        num_masks = sum(part.kind == "mask" for part in parts)
        if num_masks != 1:
            raise BackendError(
                f"the template needs {{mask}} exactly once for a masked language model; "
                f"this input has it {num_masks} times"
            )
        ids = [self._start, *self._fitted(parts, 2), self._end]
        return Cloze(ids, ids.index(self._mask))


class CausalEncoder(_Encoder):
    """Inputs of causal language models, which answer at the end.

    They start with the tokeniser's start tokens, if it has any, and are truncated like those of
    `ClozeEncoder`. A chat has the frame of the model's chat template instead; frames are cached by
    the roles of their messages. Special tokens in a text are plain text.
    """

    frames: dict[tuple[str, ...], chat.ChatFrame]
    _way_out = "set multi_token_labels: true"

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
        self._several = multi_token_labels
        if start is not None:
            self._start = start
        self._apply_template = apply_template
        self.frames = {}

    def _place_special_tokens(self, tokenizer_file: Path) -> None:
        def ids(text: str, *, special: bool = False) -> list[int]:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

        # The special tokens that the tokeniser puts before a text, without those after it.
        plain, whole = ids("a"), ids("a", special=True)
        starts = [
            index for index in range(len(whole)) if whole[index : index + len(plain)] == plain
        ]
        if not plain or not starts:
            raise BackendError(f"{tokenizer_file}: cannot tell which special tokens start a text")
        self._start = whole[: starts[0]]
        # Some tokenisers (SentencePiece) put a space before every text, but not after a line break.
        self._anchor = "" if ids("\na") == ids("\n") + plain else "\n"

    def cut(self, piece: str) -> Rendered:
        """Return a piece of a frame: its special tokens, and the text between them."""
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
                    "write the task as a template, or take an instruct model"
                )
            bare, spaced = map(self._apply_template, chat.probes(roles))
            self.frames[roles] = chat.chat_frame(roles, bare, spaced, self.cut)
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

    def spelled(self, label_words: Sequence[str], like: Rendered) -> tuple[str, ...]:
        """Return the label words as the answer to an input, or to the task's form, spells them."""
        if not chat.is_chat(like):
            return (*label_words,)
        return chat.answer_words(label_words, self.framed(like))

    def endings(self, query: Query) -> list[list[list[int]]]:
        """Return per input the token ids of the texts to score: label words, or its reference."""
        if query.want != "reference":
            return [self.label_ids(query.label_words, query.inputs[0])] * len(query.inputs)
        endings = [[self.continuation(text)] for text in query.references]
        for ((*ids,),) in endings:
            if not 0 < len(ids) < self._max_length - 1:
                raise BackendError(
                    f"a reference text is {len(ids)} tokens, it must be 1 to "
                    f"{self._max_length - 2} for this model"
                )
        return endings

    def starts(self, query: Query) -> list[list[int]]:
        """Return the token ids of the inputs of a query for a text, with room for the text."""
        if not 0 < query.max_tokens < self._max_length:
            raise BackendError(
                f"max_tokens must be from 1 to {self._max_length - 1} for this model, "
                f"not {query.max_tokens}"
            )
        return [self.encode(parts, reserve=query.max_tokens) for parts in query.inputs]

    def encode(self, parts: Rendered, *, reserve: int = 0) -> list[int]:
        """Tokenises an input, and shortens its fields until it and `reserve` tokens fit."""
        chat.refuse_mask(parts)
        # A chat template includes the start token, if the model has one.
        start = [] if chat.is_chat(parts) else self._start
        ids = self._fitted(self.framed(parts), len(start) + reserve)
        if not start and not ids:
            raise BackendError("an input is empty, and this model has no token that starts a text")
        return [*start, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def read_max_length(folder: Path, *, causal: bool = False) -> int:
    """Return a model's maximum number of tokens per input, from its folder.

    A model that is not causal is of the RoBERTa family.
    """
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
    """Return the object in a JSON file; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise SpecError(f"is not JSON: {exc}", source=str(file)) from exc
    return content if isinstance(content, dict) else {}
