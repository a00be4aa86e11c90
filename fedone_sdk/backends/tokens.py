"""Tokenisers on this machine, token counters, and the shortening of inputs to a token limit."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import structlog

from fedone_sdk.backends.base import setting_error
from fedone_sdk.errors import BackendError, MissingExtraError, SpecError
from fedone_sdk.files import user_path
from fedone_sdk.task import Part, Rendered

OPENAI_CHAT_OVERHEAD = 16
"""Upper bound on the tokens that OpenAI's chat format adds to one user message. OpenAI's cookbook
counts 7; the margin is for later models."""

CHAT_OVERHEAD = 128
"""Upper bound on the tokens that a chat template adds to one user message, on other servers. It may
add a system message (gpt-oss: 70 tokens)."""

CHARS_PER_TOKEN = 16
"""Upper bound on the mean characters per token of a text, except for long runs of a character."""

Span = tuple[int, int]
"""Start and end of a token, in characters."""

_TIKTOKEN_TIMEOUT_S = 5.0
"""Time limit for tiktoken's download of a vocabulary (a few MB, once per machine)."""

_MAX_ENCODED = 50_000
"""Maximum characters per call of tiktoken, which fails on long runs of one kind of character."""

_MAX_BYTES_PER_TOKEN = 16
"""Upper bound on the mean bytes per token of a text; natural languages have about 4."""

BYTES_PER_TOKEN = 2
"""Assumed bytes per token of an unknown tokeniser: English has about 4, texts in other scripts and
code at least 2. If a model counts more tokens, `Billing` raises later bounds."""

_FILE = "tokenizer.json"


def load_tokenizer(file: Path) -> Any:
    """Load a tokeniser of ``tokenizers``, without truncation and padding."""
    try:
        tokenizer = import_module("tokenizers").Tokenizer.from_file(str(file))
    except Exception as exc:  # The library has no base class for its errors.
        raise SpecError(f"cannot load the tokeniser: {exc}", source=str(file)) from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def special_names(tokenizer: Any, text: str) -> list[str]:
    """Return the special tokens of a tokeniser in a text."""
    added = tokenizer.get_added_tokens_decoder().values()
    return [token.content for token in added if token.special and token.content in text]


def fit_fields(
    texts: Sequence[Rendered],
    max_tokens: int,
    spans_of: Callable[[Sequence[Rendered]], Sequence[Sequence[Span]]],
    *,
    chars: int,
    limit: str,
) -> tuple[list[Rendered], int]:
    """Cut the ends of fields, the longest first, until all texts have at most `max_tokens` tokens.

    Args:
        texts: The texts, each tokenised as a whole.
        max_tokens: Maximum number of tokens of all texts together.
        spans_of: Returns the span of each token of each text.
        chars: Longer fields are cut to this many characters before they are tokenised.
        limit: Explains `max_tokens` in the error.

    Returns:
        The shortened texts, and their number of tokens.
    """
    fitted = [
        tuple(
            part._replace(text=part.text[:chars]) if part.kind == "field" else part
            for part in parts
        )
        for parts in texts
    ]
    while True:
        spans = spans_of(fitted)
        num_tokens = sum(map(len, spans))
        if num_tokens <= max_tokens:
            return fitted, num_tokens
        starts = [*chain.from_iterable(map(_token_starts, fitted, spans))]
        if not any(starts):
            raise BackendError(
                f"the input has {num_tokens} tokens without its text fields, but {limit}: shorten "
                "the prompt or the template"
            )
        # A cut may change the tokens next to it, so the length is measured again. Each iteration
        # removes at least one character.
        shortened = iter(_shorten([*chain(*fitted)], starts, num_tokens - max_tokens))
        fitted = [tuple(islice(shortened, len(parts))) for parts in fitted]


def _token_starts(parts: Sequence[Part], spans: Sequence[Span]) -> list[list[int]]:
    """Return the starts of each field's tokens, relative to the field; empty for other parts."""
    starts: list[list[int]] = []
    end = 0
    for part in parts:
        begin, end = end, end + len(part.text)
        inside = [max(a - begin, 0) for a, b in spans if a < end and b > begin]
        starts.append(inside if part.kind == "field" and part.text else [])
    return starts


def _shorten(parts: Sequence[Part], starts: Sequence[Sequence[int]], excess: int) -> Rendered:
    """Remove `excess` tokens, one after the other, each from the end of the longest field."""
    keep = [len(part_starts) for part_starts in starts]
    for _ in range(min(excess, sum(keep))):
        keep[keep.index(max(keep))] -= 1
    return tuple(
        part._replace(text=part.text[: part_starts[kept]]) if kept < len(part_starts) else part
        for part, part_starts, kept in zip(parts, starts, keep, strict=True)
    )


class TokenCounter(ABC):
    """Splits a text into tokens."""

    exact = True  # Whether the tokens are the model's. If not, their number is an estimate.
    chars_per_token = CHARS_PER_TOKEN

    @abstractmethod
    def spans(self, text: str) -> list[Span]:
        """Return the span of each token; names of special tokens are plain text."""

    def special_tokens(self, text: str) -> list[str]:
        """Return the special tokens in a text; empty if they are unknown."""
        return []

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self.spans(text))

    def min_tokens(self, count: int) -> int:
        """Return a lower bound on the model's number of tokens, given this counter's `count`."""
        return count if self.exact else -(-count * BYTES_PER_TOKEN // _MAX_BYTES_PER_TOKEN)

    def fit(self, texts: Sequence[Rendered], max_tokens: int) -> tuple[list[Rendered], int]:
        """Cut fields by `fit_fields`; return the texts and their number of tokens."""

        def spans_of(parts: Sequence[Rendered]) -> list[list[Span]]:
            return [self.spans("".join(part.text for part in text)) for text in parts]

        chars = max(max_tokens, 0) * self.chars_per_token
        limit = f"max_input_tokens is {max_tokens}"
        return fit_fields(texts, max_tokens, spans_of, chars=chars, limit=limit)


class EstimatedCounter(TokenCounter):
    """Counts one token per `BYTES_PER_TOKEN` bytes of UTF-8."""

    exact = False
    chars_per_token = BYTES_PER_TOKEN

    def spans(self, text: str) -> list[Span]:
        """Return for each `BYTES_PER_TOKEN` bytes the span of the characters that they encode."""
        char_of_byte = [
            index
            for index, character in enumerate(text)
            for _ in character.encode("utf-8", "surrogatepass")
        ]
        runs = range(0, len(char_of_byte), BYTES_PER_TOKEN)
        return [(char_of_byte[at], char_of_byte[at : at + BYTES_PER_TOKEN][-1] + 1) for at in runs]


class _FileCounter(TokenCounter):
    def __init__(self, file: Path) -> None:
        self._tokenizer = load_tokenizer(file)
        self._tokenizer.encode_special_tokens = True

    def spans(self, text: str) -> list[Span]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False).offsets)
        except TypeError as exc:
            raise BackendError("an input is not valid Unicode (it has a lone surrogate)") from exc

    def special_tokens(self, text: str) -> list[str]:
        return special_names(self._tokenizer, text)


class _TiktokenCounter(TokenCounter):
    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding

    def spans(self, text: str) -> list[Span]:
        if len(text) > _MAX_ENCODED:
            parts = range(0, len(text), _MAX_ENCODED)
            return [
                (start + begin, start + end)
                for start in parts
                for begin, end in self.spans(text[start : start + _MAX_ENCODED])
            ]
        ids = self._encoding.encode_ordinary(text)
        begins = self._encoding.decode_with_offsets(ids)[1]
        # Several tokens may share a character: the span of each of them contains it.
        return [(begin, max(begin + 1, end)) for begin, end in pairwise([*begins, len(text)])]

    def special_tokens(self, text: str) -> list[str]:
        return [name for name in self._encoding.special_tokens_set if name in text]


def find_tokenizer(tokenizer: str | None, model: str) -> Path | None:
    """Return the path of a model's ``tokenizer.json`` on this machine; None if not found.

    Args:
        tokenizer: The file or its folder; None searches by the model's name.
        model: A folder with the file, or a name in the cache of ``huggingface_hub``.
    """
    if tokenizer is not None:
        file = user_path(tokenizer)
        file = file / _FILE if file.is_dir() else file
        if not file.is_file():
            raise setting_error(f"tokenizer: there is no file {str(file)!r}")
        return file
    file = user_path(model) / _FILE
    if file.is_file():
        return file
    if find_spec("huggingface_hub") is None:
        return None
    import huggingface_hub

    try:
        cached = huggingface_hub.try_to_load_from_cache(model, _FILE)
    except ValueError:  # The server's name of the model may not be a valid name on the hub.
        return None
    return Path(cached) if isinstance(cached, str) else None


def download_tokenizer(model: str) -> Path | None:
    """Download the ``tokenizer.json`` of a model on the hub; None if that fails."""
    if model.count("/") != 1 or model.startswith("/"):
        return None
    try:
        return Path(import_module("huggingface_hub").hf_hub_download(model, _FILE))
    except Exception:  # Errors of the hub's client, of its HTTP client, and ValueError.
        return None


def token_counter(*, model: str, tokenizer: str | None = None) -> TokenCounter:
    """Return the most exact counter available. Blocks, because tiktoken may download a vocabulary.

    If `tokenizer` is None, the counter uses a file that is found by the model's name, or else
    tiktoken (for OpenAI's models), or else an estimate.
    """
    file = find_tokenizer(tokenizer, model)
    if file is not None and find_spec("tokenizers") is not None:
        return _FileCounter(file)
    if tokenizer is not None:
        raise MissingExtraError("a tokenizer.json", extra="local")
    encoding, reason = _tiktoken_encoding(model)
    if encoding is not None:
        return _TiktokenCounter(encoding)
    structlog.get_logger(__name__).warning(
        "tokens_estimated",
        model=model,
        reason=reason,
        effect=f"reserved costs and max_input_tokens assume {BYTES_PER_TOKEN} bytes per token",
        change="set tokenizer",
    )
    return EstimatedCounter()


def _tiktoken_encoding(model: str) -> tuple[Any, str]:
    """Return the encoding and an empty text, or None and the reason."""
    if find_spec("tiktoken") is None:
        return None, "tiktoken is not installed"
    loading: Future[Any] = Future()

    def load() -> None:
        try:
            loading.set_result(import_module("tiktoken").encoding_for_model(model))
        except Exception as exc:
            loading.set_exception(exc)

    # A daemon thread: the download continues after the time limit, and must not delay the exit.
    threading.Thread(target=load, name="fedone-tiktoken", daemon=True).start()
    try:
        return loading.result(_TIKTOKEN_TIMEOUT_S), ""
    except TimeoutError:
        return None, f"tiktoken took over {_TIKTOKEN_TIMEOUT_S:g} s"
    except KeyError:
        return None, "tiktoken does not know the model"
    except Exception as exc:  # An error of requests, a bad checksum, a full disk.
        return None, f"tiktoken cannot load its vocabulary ({type(exc).__name__})"
