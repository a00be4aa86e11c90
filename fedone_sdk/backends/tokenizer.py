"""Tokenisers of served models: a local file, or the server."""

from __future__ import annotations

from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedone_sdk.backends.fitting import CausalEncoder, Encoding, check_unicode
from fedone_sdk.errors import SpecError

_FILE = "tokenizer.json"


def find_tokenizer(tokenizer: str | None, model: str) -> Path | None:
    """Return the path of a model's ``tokenizer.json`` on this machine; None if there is none.

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
    except ValueError:  # The server's name of the model may not be a name on the hub.
        return None
    return Path(cached) if isinstance(cached, str) else None


class LocalEncoder(CausalEncoder):
    """Encoder of a causal model from a local file, with the server's special tokens before a text.

    These may come from another file than this one.
    """

    def __init__(self, tokenizer_file: Path, max_length: int, start: list[int]) -> None:
        super().__init__(tokenizer_file, max_length)
        self._start = start


class UnknownText(Exception):
    """The server's tokenisation of a text is not in the cache."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__("not tokenised yet")


class ServerTokenizer:
    """A cache of a server's tokenisations, with the interface of `tokenizers.Tokenizer`.

    It sends no requests: `encode` raises `UnknownText`, and the caller adds the text by `add`. The
    least recently used text is evicted.
    """

    def __init__(self, *, max_texts: int = 10_000) -> None:
        self._max_texts = max_texts
        self._known: OrderedDict[str, Encoding] = OrderedDict()
        self._names: dict[int, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Return the tokens of a text, without special tokens.

        Raises:
            TypeError: It is not valid Unicode.
            UnknownText: It is not in the cache.
        """
        if not text:
            return Encoding([], [])
        if (found := self._known.get(text)) is None:
            check_unicode(text)
            raise UnknownText(text)
        self._known.move_to_end(text)
        return found

    def id_to_token(self, token_id: int) -> str:
        """Return the server's name of a token."""
        return self._names[token_id]

    def add(self, text: str, ids: list[int], names: list[str]) -> None:
        """Add the tokens of a text, as the server makes them without special tokens."""
        self._known[text] = Encoding.spread(text, ids)
        self._names.update(zip(ids, names, strict=True))
        if len(self._known) > self._max_texts:
            self._known.popitem(last=False)


class ServerEncoder(CausalEncoder):
    """Encoder of a causal model whose tokeniser is only on its server.

    The constructor and all methods raise `UnknownText` until the texts are in the cache. Special
    tokens in a text are parsed as special tokens, because the server has no option against it.
    """

    def __init__(self, tokenizer: ServerTokenizer, max_length: int, start: list[int]) -> None:
        self._tokenizer: Any = tokenizer
        self._max_length = max_length
        self._start = start
        self.frames = {}
        plain, behind = self._tokenise("a").ids, self._tokenise("\na").ids
        # As in `CausalEncoder`: some tokenisers put a space before every text.
        self._anchor = "" if behind == self._tokenise("\n").ids + plain else "\n"
