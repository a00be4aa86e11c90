"""How a rendered input becomes the token ids of a model, shortened until they fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from fedone_sdk.errors import BackendError, LabelWordError, SpecError
from fedone_sdk.task import Part, Rendered

__all__ = ["CausalEncoder", "Cloze", "ClozeEncoder", "read_json", "read_max_length"]


class Cloze(NamedTuple):
    """An input as a masked model takes it: token ids, and where the mask is among them."""

    ids: list[int]
    mask_index: int


class _Encoder:
    """A loaded tokeniser. Safe to use from several threads at once."""

    def __init__(self, tokenizer_file: Path, max_length: int) -> None:
        tokenizers = import_module("tokenizers")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
        except Exception as exc:  # The library has no base class of its own.
            raise BackendError(f"{tokenizer_file}: cannot load the tokeniser: {exc}") from exc
        self._max_length = max_length
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._place_special_tokens(tokenizer_file)
        # "<mask>" in somebody's text is text.
        self._tokenizer.encode_special_tokens = True
        # Special tokens are placed here by id; what is left to post-process is that offsets must
        # cover the spaces too, for cutting.
        self._tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)

    def _place_special_tokens(self, tokenizer_file: Path) -> None:
        """Learns the special tokens, while the tokeniser still places them itself."""
        raise NotImplementedError

    def _tokenise(self, text: str) -> Any:
        # Text by text: `encode_batch` is no faster on short texts, and starts a thread pool of its
        # own that ignores the backend's.
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except TypeError as exc:
            raise BackendError("an input is not valid Unicode (it has a lone surrogate)") from exc

    def _fitted(self, parts: Rendered, num_extra: int) -> list[list[int]]:
        """The token ids of the texts between the masks, with `num_extra` more at most max_length.

        Raises:
            BackendError: It is too long without its fields already.
        """
        while True:
            borders = [index for index, part in enumerate(parts) if part.kind == "mask"]
            sides = [
                parts[begin:end]
                for begin, end in zip(
                    [0, *(index + 1 for index in borders)], [*borders, len(parts)], strict=True
                )
            ]
            # Each side is one text: tokens may span two parts. <mask> swallows the space before it
            # (`lstrip`), as it did in the model's training.
            texts = ["".join(part.text for part in side) for side in sides]
            texts[:-1] = [text.rstrip() for text in texts[:-1]]
            found = [self._tokenise(text) for text in texts]
            length = sum(len(encoding.ids) for encoding in found) + num_extra
            if length <= self._max_length:
                return [encoding.ids for encoding in found]
            starts: list[list[int]] = []
            for side, encoding in zip(sides, found, strict=True):
                starts += [*token_starts(side, encoding.offsets), []]
            if not any(starts):
                raise BackendError(
                    f"the input is {length} tokens without its text fields, "
                    f"the model takes {self._max_length}: shorten the prompt or the template"
                )
            # Cutting may change how the border is tokenised, so measure again. It ends: each turn
            # removes a character or more.
            parts = shorten(parts, starts[:-1], length - self._max_length)


class ClozeEncoder(_Encoder):
    """Inputs of masked language models of the RoBERTa family.

    A too long input loses the ends of its text fields, the longest field first; prompt, template
    text and mask stay whole. Special tokens in a text are text.

    Attributes:
        pad_id: The token id that fills up short inputs of a batch.
        mask_id: The token id of the mask.

    Args:
        tokenizer_file: The model's ``tokenizer.json``.
        max_length: Tokens that the model takes per input, special tokens included.

    Raises:
        BackendError: The file holds no such tokeniser.
    """

    pad_id: int
    mask_id: int

    def _place_special_tokens(self, tokenizer_file: Path) -> None:
        special = [self._tokenizer.token_to_id(name) for name in ("<s>", "<pad>", "</s>", "<mask>")]
        if None in special:
            raise BackendError(f"{tokenizer_file}: needs the tokens <s>, <pad>, </s> and <mask>")
        self._start, self.pad_id, self._end, self.mask_id = special

    def label_id(self, word: str) -> int:
        """The token id of a label word, with its leading space as given.

        Raises:
            LabelWordError: It is not one token.
        """
        encoding = self._tokenise(word)
        if len(encoding.ids) != 1:
            raise LabelWordError(word, encoding.tokens)
        return int(encoding.ids[0])

    def encode(self, parts: Rendered) -> Cloze:
        """Tokenises a rendered input, and shortens its fields until it fits.

        Raises:
            BackendError: There is not exactly one mask, or the rest is too long already.
        """
        num_masks = sum(part.kind == "mask" for part in parts)
        if num_masks != 1:
            raise BackendError(
                f"the template needs {{mask}} exactly once for a masked language model; "
                f"this input has it {num_masks} times"
            )
        before, after = self._fitted(parts, num_extra=3)
        return Cloze([self._start, *before, self.mask_id, *after, self._end], 1 + len(before))


class CausalEncoder(_Encoder):
    """Inputs of causal language models, which answer at the end.

    They start as the model's own tokeniser starts them, with <s> or the like where it has that,
    and are shortened as those of `ClozeEncoder`. Special tokens in a text are text.

    Args:
        tokenizer_file: The model's ``tokenizer.json``.
        max_length: Tokens that the model takes per input, special tokens included.

    Raises:
        BackendError: The file holds no tokeniser.
    """

    def _place_special_tokens(self, tokenizer_file: Path) -> None:
        def ids(text: str, *, special: bool = False) -> list[int]:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

        # Whatever the tokeniser puts before a text, but nothing of what it puts after one.
        plain, whole = ids("a"), ids("a", special=True)
        starts = [
            index for index in range(len(whole)) if whole[index : index + len(plain)] == plain
        ]
        if not plain or not starts:
            raise BackendError(f"{tokenizer_file}: cannot tell which special tokens start a text")
        self._start = whole[: starts[0]]
        # Some tokenisers (SentencePiece's) begin every text with a space of their own; behind a
        # line break they show how a text goes on.
        self._anchor = "" if ids("\na") == ids("\n") + plain else "\n"

    def continuation(self, text: str) -> list[int]:
        """The token ids of a text that goes on after another, with its leading space as given.

        Raises:
            BackendError: The tokeniser does not show them apart from the text before.
        """
        anchor = self._tokenise(self._anchor).ids
        ids: list[int] = self._tokenise(self._anchor + text).ids
        if ids[: len(anchor)] != anchor:
            raise BackendError(f"cannot tell how {text!r} is tokenised after another text")
        return ids[len(anchor) :]

    def label_id(self, word: str) -> int:
        """The token id of a label word, with its leading space as given.

        Raises:
            LabelWordError: It is not one token.
        """
        ids = self.continuation(word)
        if len(ids) != 1:
            raise LabelWordError(word, [self._tokenizer.id_to_token(token) for token in ids])
        return ids[0]

    def encode(self, parts: Rendered, *, reserve: int = 0) -> list[int]:
        """Tokenises a rendered input, and shortens its fields until it fits.

        Args:
            parts: The rendered input.
            reserve: Tokens that must be left for what follows.

        Raises:
            BackendError: There is a mask, or nothing at all, or the rest is too long already.
        """
        if any(part.kind == "mask" for part in parts):
            raise BackendError(
                "the template has {mask}, but a causal language model answers at the end: "
                "take {mask} and what follows it out of the template"
            )
        (ids,) = self._fitted(parts, num_extra=len(self._start) + reserve)
        if not self._start and not ids:
            raise BackendError("an input is empty, and this model has no token that starts a text")
        return [*self._start, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def read_max_length(folder: Path, *, causal: bool = False) -> int:
    """The tokens that a model takes per input, as its folder says.

    Args:
        folder: Holds ``tokenizer_config.json`` or ``config.json``.
        causal: A causal model; else one of the RoBERTa family.

    Raises:
        SpecError: Neither file says it, or one is not JSON.
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
    """The object in a JSON file; empty where there is no such file.

    Raises:
        SpecError: It is not JSON.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise SpecError(f"is not JSON: {exc}", source=str(file)) from exc
    return content if isinstance(content, dict) else {}


def token_starts(parts: Sequence[Part], offsets: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Where the tokens of each part start, counted from the part's start; only fields have any."""
    starts: list[list[int]] = []
    end = 0
    for part in parts:
        begin, end = end, end + len(part.text)
        starts.append(
            [max(a - begin, 0) for a, b in offsets if a < end and b > begin]
            if part.kind == "field"
            else []
        )
    return starts


def shorten(parts: Rendered, starts: Sequence[Sequence[int]], excess: int) -> Rendered:
    """Cuts `excess` tokens off the ends of the fields, each from the field that is longest then."""
    keep = [len(part_starts) for part_starts in starts]
    for _ in range(min(excess, sum(keep))):
        keep[keep.index(max(keep))] -= 1
    return tuple(
        part._replace(text=part.text[: part_starts[kept]]) if kept < len(part_starts) else part
        for part, part_starts, kept in zip(parts, starts, keep, strict=True)
    )
