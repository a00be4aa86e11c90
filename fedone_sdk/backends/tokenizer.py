"""Where a served model's tokeniser is found: in a file here, or else on the server itself."""

from __future__ import annotations

from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fedone_sdk.backends.fitting import CausalEncoder
from fedone_sdk.errors import SpecError

__all__ = ["LocalEncoder", "ServerEncoder", "ServerTokenizer", "UnknownText", "find_tokenizer"]

_FILE = "tokenizer.json"


def find_tokenizer(tokenizer: str | None, model: str) -> Path | None:
    """The ``tokenizer.json`` of a model, if it is on this machine.

    Args:
        tokenizer: The file, or a folder with it; None looks for one by the model's name.
        model: A folder with it, or a name in the cache of ``huggingface_hub``.

    Raises:
        SpecError: `tokenizer` does not name such a file.
    """
    if tokenizer is not None:
        file = Path(tokenizer).expanduser()
        file = file / _FILE if file.is_dir() else file
        if not file.is_file():
            raise SpecError(f"tokenizer: there is no file {str(file)!r}", source="backend")
        return file
    file = Path(model).expanduser() / _FILE
    if file.is_file():
        return file
    if find_spec("huggingface_hub") is None:
        return None
    import huggingface_hub

    try:
        cached = huggingface_hub.try_to_load_from_cache(model, _FILE)
    except ValueError:  # The server's name for it need not be a name on the hub.
        return None
    return Path(cached) if isinstance(cached, str) else None


class LocalEncoder(CausalEncoder):
    """A causal model's inputs by a file here, started as its server starts them.

    Args:
        tokenizer_file: The model's ``tokenizer.json``.
        max_length: Tokens that the model takes per input, special tokens included.
        start: The special tokens that the server puts before a text. It may read them from other
            files than this one.
    """

    def __init__(self, tokenizer_file: Path, max_length: int, start: list[int]) -> None:
        super().__init__(tokenizer_file, max_length)
        self._start = start


class UnknownText(Exception):
    """The server has not been asked yet how it tokenises a text.

    Attributes:
        text: The text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__("not tokenised yet")


class _Encoding(NamedTuple):
    """What `tokenizers` calls so, as far as a server tells."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class ServerTokenizer:
    """What a server has said about texts, in the form of a `tokenizers.Tokenizer`.

    It does not ask: it raises `UnknownText`, and whoever can ask calls `learn`.

    Args:
        max_texts: How many to remember; the least recently used one goes first.
    """

    def __init__(self, *, max_texts: int = 10_000) -> None:
        self._max_texts = max_texts
        self._known: OrderedDict[str, _Encoding] = OrderedDict()
        self._names: dict[int, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> _Encoding:
        """The tokens of a text, without special tokens.

        Raises:
            TypeError: It is not valid Unicode.
            UnknownText: It has not been learned.
        """
        if not text:
            return _Encoding([], [])
        if (found := self._known.get(text)) is None:
            try:
                text.encode()
            except UnicodeEncodeError as exc:
                raise TypeError("a lone surrogate") from exc
            raise UnknownText(text)
        self._known.move_to_end(text)
        return found

    def id_to_token(self, token_id: int) -> str:
        """What the server calls a token that it has made."""
        return self._names[token_id]

    def learn(self, text: str, ids: list[int], names: list[str]) -> None:
        """Remembers the tokens of a text, as the server makes them without special tokens."""
        # A server does not say which characters a token covers. For cutting it is enough that
        # they are spread evenly: what is left is measured again.
        borders = [index * len(text) // len(ids) for index in range(len(ids))]
        self._known[text] = _Encoding(
            ids, list(zip(borders, [*borders[1:], len(text)], strict=True))
        )
        self._names.update(zip(ids, names, strict=True))
        if len(self._known) > self._max_texts:
            self._known.popitem(last=False)


class ServerEncoder(CausalEncoder):
    """A causal model's inputs where only its server has the tokeniser.

    All methods, and the making of one, raise `UnknownText` until the tokeniser knows the texts.
    Special tokens in a text are special tokens here: the server cannot be told otherwise.

    Args:
        tokenizer: What the server has said.
        max_length: Tokens that the model takes per input, special tokens included.
        start: The special tokens that the server puts before a text.
    """

    def __init__(self, tokenizer: ServerTokenizer, max_length: int, start: list[int]) -> None:
        self._tokenizer: Any = tokenizer
        self._max_length = max_length
        self._start = start
        self.frames = {}
        plain, behind = self._tokenise("a").ids, self._tokenise("\na").ids
        # As in `CausalEncoder`: some tokenisers begin every text with a space of their own.
        self._anchor = "" if behind == self._tokenise("\n").ids + plain else "\n"
