"""Tokenisation of rendered inputs, truncated to a model's maximum length."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from fedone_sdk.backends.base import Query
from fedone_sdk.backends.chat import (
    MASKED,
    ApplyTemplate,
    ChatFrame,
    answer_words,
    chat_frame,
    is_chat,
    messages_of,
    probes,
    refuse_chat,
    unpadded,
)
from fedone_sdk.errors import BackendError, LabelWordError, SpecError
from fedone_sdk.task import Part, Rendered

CHARS_PER_TOKEN = 16
"""Mean number of characters per token that no text exceeds, but for long runs of one character."""


Span = tuple[int, int]
"""Start and end of a token, in characters."""


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


def special_names(tokenizer: Any, text: str) -> list[str]:
    """Return the special tokens of a tokeniser of ``tokenizers`` in a text."""
    added = tokenizer.get_added_tokens_decoder().values()
    return [token.content for token in added if token.special and token.content in text]


class _Encoder:
    # Text before a continuation, for tokenisers that tokenise the start of a text differently.
    _anchor = ""
    # What allows label words of several tokens.
    _way_out = ""

    def __init__(self, tokenizer_file: Path, max_length: int) -> None:
        tokenizers = import_module("tokenizers")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
        except Exception as exc:  # The library has no base class for its errors.
            raise BackendError(f"{tokenizer_file}: cannot load the tokeniser: {exc}") from exc
        self._max_length = max_length
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._place_special_tokens(tokenizer_file)
        # "<mask>" in a user's text is plain text.
        self._tokenizer.encode_special_tokens = True
        # Special tokens are placed here by id; what is left to post-process is that offsets must
        # cover the spaces too, for cutting.
        self._tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)

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
        found = self._tokenise(self._anchor + text)
        if found.ids[: len(anchor)] != anchor:
            raise BackendError(f"cannot tell how {text!r} is tokenised after another text")
        shift = len(self._anchor)
        return Encoding(
            list(found.ids[len(anchor) :]),
            [(begin - shift, end - shift) for begin, end in found.offsets[len(anchor) :]],
        )

    def continuation(self, text: str) -> list[int]:
        """Return the token ids of a text that continues another one; its leading space is kept."""
        return list(self._continued(text).ids)

    def spelled(self, label_words: Sequence[str], like: Rendered) -> tuple[str, ...]:
        """Return the label words as the answer to an input, or to the task's form, spells them."""
        return (*label_words,)

    def label_ids(
        self, label_words: Sequence[str], like: Rendered = (), *, several: bool = False
    ) -> list[list[int]]:
        """Return the token ids of each label word, in its spelling after an input (`spelled`)."""
        words = self.spelled(label_words, like)
        found: list[list[int]] = []
        for word in words:
            ids = self.continuation(word)
            if not ids or (len(ids) > 1 and not several):
                names = [self._tokenizer.id_to_token(token) for token in ids]
                raise LabelWordError(word, names, self._way_out)
            if ids in found:
                same = words[found.index(ids)]
                raise BackendError(
                    f"label words {same!r} and {word!r} are the same token of this model: "
                    "choose others"
                )
            found.append(ids)
        return found

    def _special_id(self, text: str) -> int:
        return int(self._tokenizer.token_to_id(text))

    def _fitted(self, parts: Rendered, num_extra: int, mask_id: int | None = None) -> list[int]:
        """Return the token ids of a rendered input, truncated to max_length - `num_extra`."""
        borders = [index for index, part in enumerate(parts) if part.kind in ("mask", "special")]
        placed = [
            self._special_id(parts[index].text) if parts[index].kind == "special" else mask_id
            for index in borders
        ]
        masks = [side for side, index in enumerate(borders) if parts[index].kind == "mask"]
        # Each side of a border is one text: tokens may span two parts.
        pairs = pairwise([-1, *borders, len(parts)])
        sides = [parts[before + 1 : border] for before, border in pairs]
        found: list[Any] = []

        def offsets(sides: Sequence[Rendered]) -> list[Sequence[Span]]:
            texts = ["".join(part.text for part in side) for side in sides]
            # <mask> swallows the space before it (`lstrip`), as it did in the model's training.
            for side in masks:
                texts[side] = texts[side].rstrip()
            found[:] = [self._tokenise(texts[0]), *map(self._continued, texts[1:])]
            return [encoding.offsets for encoding in found]

        most = self._max_length - len(placed) - num_extra
        _, num_tokens = fit(sides, most, offsets, chars=self._max_length * CHARS_PER_TOKEN)
        if num_tokens > most:
            raise BackendError(
                f"the input is {num_tokens + self._max_length - most} tokens without its text "
                f"fields, the model takes {self._max_length}: shorten the prompt or the template"
            )
        ids = list(found[0].ids)
        for between, encoding in zip(placed, found[1:], strict=True):
            ids += [between, *encoding.ids]
        return ids


class ClozeEncoder(_Encoder):
    """Inputs of masked language models of the RoBERTa family.

    The text fields of an input that is too long are truncated at their ends, the longest first;
    prompt, template text and mask are not. Special tokens in a text are plain text.
    """

    pad_id: int
    mask_id: int

    def _place_special_tokens(self, tokenizer_file: Path) -> None:
        special = [self._tokenizer.token_to_id(name) for name in ("<s>", "<pad>", "</s>", "<mask>")]
        if None in special:
            raise BackendError(f"{tokenizer_file}: needs the tokens <s>, <pad>, </s> and <mask>")
        self._start, self.pad_id, self._end, self.mask_id = special

    def encode(self, parts: Rendered) -> Cloze:
        """Tokenises an input, and shortens its fields until it fits."""
        refuse_chat(parts, MASKED)
        num_masks = sum(part.kind == "mask" for part in parts)
        if num_masks != 1:
            raise BackendError(
                f"the template needs {{mask}} exactly once for a masked language model; "
                f"this input has it {num_masks} times"
            )
        ids = [self._start, *self._fitted(parts, 2, self.mask_id), self._end]
        return Cloze(ids, ids.index(self.mask_id))


class CausalEncoder(_Encoder):
    """Inputs of causal language models, which answer at the end.

    They start with the tokeniser's start tokens, if it has any, and are truncated like those of
    `ClozeEncoder`. A chat has the frame of the model's chat template instead; frames are cached by
    the roles of their messages. Special tokens in a text are plain text.
    """

    frames: dict[tuple[str, ...], ChatFrame]
    _way_out = "set multi_token_labels: true"

    def __init__(
        self,
        tokenizer_file: Path,
        max_length: int,
        apply_template: ApplyTemplate | None = None,
        *,
        start: list[int] | None = None,
    ) -> None:
        super().__init__(tokenizer_file, max_length)
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
        special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        parts: list[Part] = []
        end = 0
        for found in special.finditer(piece):
            parts += [Part("text", piece[end : found.start()]), Part("special", found[0])]
            end = found.end()
        return tuple(part for part in (*parts, Part("text", piece[end:])) if part.text)

    def frame(self, roles: tuple[str, ...]) -> ChatFrame:
        """Return the frame of the model's chat template for messages of these roles."""
        if roles not in self.frames:
            if self._apply_template is None:
                raise BackendError(
                    "the task is a chat, but the model has no chat template: "
                    "write the task as a template, or take an instruct model"
                )
            bare, spaced = map(self._apply_template, probes(roles))
            self.frames[roles] = chat_frame(roles, bare, spaced, self.cut)
        return self.frames[roles]

    def framed(self, parts: Rendered) -> Rendered:
        """Return a chat in the frame of the model's template; other inputs are unchanged."""
        if not is_chat(parts):
            return parts
        messages = messages_of(parts)
        frame = self.frame(tuple(message.role for message in messages))
        found: list[Part] = []
        for piece, strips, message in zip(frame.pieces, frame.strips, messages, strict=False):
            found += [*piece, *unpadded(message.parts, strips)]
        return (*found, *frame.pieces[-1])

    def spelled(self, label_words: Sequence[str], like: Rendered) -> tuple[str, ...]:
        """Return the label words as the answer to an input, or to the task's form, spells them."""
        return answer_words(label_words, self.framed(like)) if is_chat(like) else (*label_words,)

    def endings(self, query: Query, *, several: bool) -> list[list[list[int]]]:
        """Return per input the token ids of the texts to score: label words, or its reference."""
        if query.want != "reference":
            return [self.label_ids(query.label_words, query.inputs[0], several=several)] * len(
                query.inputs
            )
        found = [self.continuation(text) for text in query.references]
        if not all(found):
            raise BackendError("a reference text is empty")
        return [[ids] for ids in found]

    def encode(self, parts: Rendered, *, reserve: int = 0) -> list[int]:
        """Tokenises an input, and shortens its fields until it and `reserve` tokens fit."""
        if any(part.kind == "mask" for part in parts):
            raise BackendError(
                "the template has {mask}, but a causal language model answers at the end: "
                "take {mask} and what follows it out of the template"
            )
        # A chat template includes the start token, if the model has one.
        start = [] if is_chat(parts) else self._start
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
    limits = []
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
    return int(min(limits))


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise SpecError(f"is not JSON: {exc}", source=str(file)) from exc
    return content if isinstance(content, dict) else {}


def fit(
    texts: Sequence[Rendered],
    most: int,
    offsets: Callable[[Sequence[Rendered]], Sequence[Sequence[Span]]],
    *,
    chars: int,
) -> tuple[list[Rendered], int]:
    """Truncate fields at their ends, the longest first, until the texts have `most` tokens.

    Args:
        texts: Each is tokenised as a whole.
        most: Tokens of all texts together.
        offsets: Return the characters that each token of each text covers.
        chars: Characters of a field that are tokenised at most.

    Returns:
        The texts, and their number of tokens, which is over `most` if that is so without fields.
    """
    fitted = [
        tuple(
            part._replace(text=part.text[:chars]) if part.kind == "field" else part
            for part in parts
        )
        for parts in texts
    ]
    while True:
        spans = offsets(fitted)
        num_tokens = sum(map(len, spans))
        starts = [
            start
            for parts, each in zip(fitted, spans, strict=True)
            for start in token_starts(parts, each)
        ]
        if num_tokens <= most or not any(starts):
            return fitted, num_tokens
        # Truncation may change the tokens at the border, so the length is measured again.
        # Each iteration removes at least one character.
        left = iter(shorten([*chain(*fitted)], starts, num_tokens - most))
        fitted = [tuple(islice(left, len(parts))) for parts in fitted]


def token_starts(parts: Sequence[Part], offsets: Sequence[Span]) -> list[list[int]]:
    """Return the starts of each field's tokens, relative to the field; empty for other parts."""
    starts: list[list[int]] = []
    end = 0
    for part in parts:
        begin, end = end, end + len(part.text)
        starts.append(
            [max(a - begin, 0) for a, b in offsets if a < end and b > begin]
            if part.kind == "field" and part.text
            else []
        )
    return starts


def shorten(parts: Sequence[Part], starts: Sequence[Sequence[int]], excess: int) -> Rendered:
    """Remove `excess` tokens from the ends of the fields, each from the longest field."""
    keep = [len(part_starts) for part_starts in starts]
    excess = min(excess, sum(keep))
    while excess:
        most = max(keep)
        longest = [index for index, kept in enumerate(keep) if kept == most][:excess]
        below = max((kept for kept in keep if kept < most), default=0)
        step = min(most - below, excess // len(longest))
        for index in longest:
            keep[index] -= step
        excess -= step * len(longest)
    return tuple(
        part._replace(text=part.text[: part_starts[kept]]) if kept < len(part_starts) else part
        for part, part_starts, kept in zip(parts, starts, keep, strict=True)
    )
