"""The engine of llama.cpp in this process, and the metadata of GGUF files. All calls block."""

from __future__ import annotations

import json
import math
import os
import secrets
import struct
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fedone_sdk.backends.encoders import CausalEncoder, Encoding
from fedone_sdk.errors import BackendError, SpecError, one_line

_TIMEOUT_S = 60.0
"""Time limit of requests for tokens or a template, which do not wait for the model."""

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens local URLs without the environment's proxy."""

_FIRST_PROBS = 256
"""Number of likeliest next tokens that are requested first. A second request returns label words
that are not among them. A request for all tokens would take 10 microseconds per token."""

_SAMPLED_BIAS, _SHOWN_BIAS = 104.0, 64.0
"""Biases of the sampled token and of other tokens to show, nats; no logits differ by so much."""

_STRING, _ARRAY = 8, 9
# Formats of `struct`, indexed by GGUF's type number; empty for strings and arrays.
_NUMBERS = ("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", "", "", "<Q", "<q", "<d")
_MAX_TEXT = 1 << 24


class Written(NamedTuple):
    """A generated text without special tokens, and its number of tokens, the end token included."""

    text: str
    num_tokens: int


class LlamaEngine:
    """A loaded model.

    Queries call the engine directly. Tokenisation and the chat template are only available through
    the engine's HTTP server, which listens on loopback with a random key.

    Sequences are computed one at a time. Each reuses the prefix that it shares with the previous
    sequence of the same call. Nothing is reused between calls, so no call affects another.

    Args:
        context_length: Maximum tokens of a sequence.
        exact: Whether attention is computed in float32. Half precision, the engine's default, is a
            fifth faster, and changes log-probabilities by 0.01 nats.
    """

    def __init__(self, file: Path, *, context_length: int, threads: int, exact: bool) -> None:
        self.name = file.name
        self._key = secrets.token_urlsafe(32)
        engine = _engine()
        params = engine.CommonParams()
        params.model.path = str(file)
        params.n_ctx = context_length
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        if exact:
            params.flash_attn_type = engine.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            params.cache_type_k = params.cache_type_v = engine.ggml_type.GGML_TYPE_F32
        # No cache between calls, because an earlier call must not change an answer.
        params.cache_ram_mib = 0
        # With the full cache a sliding-window model can resume from any earlier token.
        params.swa_full = True
        params.verbosity = -1  # A library must not write to stderr.
        params.ui = False
        params.endpoint_slots = False
        params.api_keys = [self._key]
        try:
            self._server = engine.Server(params)
        except RuntimeError as exc:
            raise BackendError(
                f"{file.name}: llama.cpp cannot load the model: the architecture is unknown, the "
                "file is damaged, or there is too little memory for the model and "
                f"{context_length} tokens of context (backend.max_input_tokens)"
            ) from exc
        self._url = str(self._server.listening_address)
        self.context_length = context_length
        self._names: dict[int, str] = {}
        (model,) = self._request("/v1/models")["data"]
        self.num_vocab = int(model["meta"]["n_vocab"])
        self._sampled = self.tokenise("a")[-1][0]
        self._bos = str(self._request("/props")["bos_token"])

    def next_log_probs(
        self, prompts: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
    ) -> list[dict[int, float]]:
        """Return the log-probabilities of each prompt's next tokens, including all in `wanted`."""
        rows = []
        for number, (prompt, tokens) in enumerate(zip(prompts, wanted, strict=True)):
            sampled = self._next_token(prompt, fresh=number == 0, n_probs=_FIRST_PROBS)
            shown = {token["id"]: token["logprob"] for token in sampled["top_logprobs"]}
            shown[self._sampled] = sampled["logprob"]
            if missing := sorted({*tokens} - shown.keys()):
                shown |= self._unlikely(prompt, missing, sampled["logprob"])
            rows.append(shown)
        return rows

    def _unlikely(
        self, prompt: Sequence[int], tokens: Sequence[int], sampled: float
    ) -> dict[int, float]:
        """Return the log-probabilities of tokens, given that of the sampled token.

        The bias is the same for all tokens to show, so it does not change the ratios between them.
        """
        answer = self._next_token(
            prompt, fresh=False, n_probs=len(tokens) + 1, post_sampling_probs=True, shown=tokens
        )
        shares = {token["id"]: token["prob"] for token in answer["top_probs"]}
        if not all(shares.get(token) for token in [*tokens, self._sampled]):  # Too unlikely.
            every = self._next_token(prompt, fresh=False, n_probs=self.num_vocab)["top_logprobs"]
            return {token["id"]: token["logprob"] for token in every}
        offset = sampled + _SAMPLED_BIAS - _SHOWN_BIAS - math.log(shares[self._sampled])
        return {token: math.log(shares[token]) + offset for token in tokens}

    def _next_token(
        self, prompt: Sequence[int], *, fresh: bool, shown: Sequence[int] = (), **options: object
    ) -> dict[str, Any]:
        """Sample one token after a prompt, and return it with the probabilities of other tokens."""
        # The bias makes the engine sample a fixed token. If it sampled a part of a character, it
        # would return no log-probabilities. The bias changes no returned log-probability, except
        # with `post_sampling_probs`.
        biases = [[self._sampled, _SAMPLED_BIAS], *([token, _SHOWN_BIAS] for token in shown)]
        choice = self._complete(
            prompt, fresh=fresh, n_predict=1, samplers=[], logit_bias=biases, **options
        )
        token: dict[str, Any] = choice["logprobs"]["content"][0]
        return token

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        stop: Sequence[str] = (),
        schema: str = "",
    ) -> list[Written]:
        """Generate greedily after each prompt, up to a stop text or `max_tokens`.

        With a JSON schema, the text is an object that the schema allows, unless it is cut off.
        """
        form = {"json_schema": json.loads(schema)} if schema else {}
        written = []
        for prompt in prompts:
            # No computed prefix is reused, so that a text does not depend on earlier texts.
            choice = self._complete(
                prompt,
                fresh=True,
                n_predict=max_tokens,
                n_probs=1,
                temperature=0,
                stop=list(stop),
                **form,
            )
            written.append(Written(choice["text"], len(choice["logprobs"]["content"])))
        return written

    def _complete(self, prompt: Sequence[int], *, fresh: bool, **options: object) -> dict[str, Any]:
        answer = self._server.handle_completions(
            {"prompt": [list(prompt)], "cache_prompt": not fresh, **options}
        )
        choices = answer.get("choices")
        if not isinstance(choices, list):
            message = answer.get("error", {}).get("message", "no answer")
            raise BackendError(f"{self.name}: llama.cpp failed: {message}")
        (choice,) = choices
        return dict(choice)

    def tokenise(self, text: str, *, special: bool = False) -> list[tuple[int, str]]:
        """Return the id and text of each token; `special` allows special tokens."""
        return self._tokens(text, parse_special=special)

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Tokenise a text, like a tokeniser of ``tokenizers``."""
        if not text and not add_special_tokens:
            return Encoding([], [])
        text.encode()  # Raises for a lone surrogate, which the server would replace.
        tokens = self._tokens(text, add_special=add_special_tokens)
        self._names.update(tokens)
        return Encoding.spread(text, [token for token, _ in tokens])

    def token_to_id(self, special: str) -> int:
        """Return the id of a special token."""
        ((token, _),) = self.tokenise(special, special=True)
        return token

    def id_to_token(self, token_id: int) -> str:
        """Return the text of a token that `encode` has returned."""
        return self._names[token_id]

    def _tokens(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[tuple[int, str]]:
        options = {"add_special": add_special, "parse_special": parse_special}
        answer = self._request("/tokenize", {"content": text, "with_pieces": True, **options})
        # A token that is a part of a character is reported as bytes.
        return [
            (token["id"], piece if isinstance(piece := token["piece"], str) else bytes(piece).hex())
            for token in answer["tokens"]
        ]

    def apply_template(self, messages: list[dict[str, str]]) -> str:
        """Apply the model's chat template to messages."""
        text = str(self._request("/apply-template", {"messages": messages})["prompt"])
        # The engine leaves out the start token, because its server would add it later.
        starts = bool(self._tokens("", add_special=True))
        return f"{self._bos}{text}" if starts and not text.startswith(self._bos) else text

    def _request(self, path: str, body: object = None) -> dict[str, Any]:
        """Return the HTTP server's answer to a GET request, or to a POST request with a body."""
        request = urllib.request.Request(
            self._url + path,
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
        )
        try:
            with _DIRECT.open(request, timeout=_TIMEOUT_S) as response:
                answer: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as exc:
            message = f"status {exc.code}"
            with exc, suppress(LookupError, TypeError, ValueError):
                message = one_line(json.load(exc)["error"]["message"])
            what = "the chat template refuses the task's messages" if "template" in path else path
            raise BackendError(f"{self.name}: {what}: {message}") from exc
        except (OSError, ValueError) as exc:
            reason = type(exc).__name__
            raise BackendError(f"{self.name}: llama.cpp does not answer: {reason}") from exc
        return answer


def _engine() -> Any:
    """Import the engine's module.

    By default, OpenMP's threads spin while they wait for each other. Another busy process then
    makes the model tens of times slower. With the setting here they sleep after a short spin.
    """
    name = "GOMP_SPINCOUNT"
    if name in os.environ or "OMP_WAIT_POLICY" in os.environ:
        return import_module("xllamacpp")
    os.environ[name] = "1000"
    try:
        return import_module("xllamacpp")
    finally:
        del os.environ[name]


class GgufEncoder(CausalEncoder):
    """Encoder for the model of an engine."""

    def __init__(
        self, engine: LlamaEngine, *, has_template: bool, multi_token_labels: bool
    ) -> None:
        self._engine: LlamaEngine = engine
        self._tokenizer: Any = engine
        self._multi_token = multi_token_labels
        self._max_length = engine.context_length
        self._apply_template = engine.apply_template if has_template else None
        self.frames = {}
        self._read_special_tokens(Path(engine.name))

    def special_names(self, text: str) -> list[str]:
        """Return the special tokens in a text."""
        return [
            name  # The name of a special token has other ids if it is tokenised as plain text.
            for token, name in dict(self._engine.tokenise(text, special=True)).items()
            if [token] != [plain for plain, _ in self._engine.tokenise(name)]
        ]


# If a file has no chat template, the engine silently uses a default, so the metadata is read here.
# The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md


def read_gguf(file: Path) -> dict[str, object]:
    """Return a GGUF file's metadata, without arrays."""
    try:
        with file.open("rb") as content:
            if content.read(4) != b"GGUF":
                raise SpecError("is not a GGUF file", source=str(file))
            version, _, num_pairs = _numbers(content, "<IQQ")
            if version < 2:
                raise SpecError(f"has GGUF version {version}; needs 2 or later", source=str(file))
            metadata: dict[str, object] = {}
            for _ in range(num_pairs):
                key, (kind,) = _text(content), _numbers(content, "<I")
                if (value := _value(content, kind)) is not None:
                    metadata[key] = value
            return metadata
    except (EOFError, LookupError, TypeError, struct.error, UnicodeDecodeError) as exc:
        raise SpecError("is a damaged GGUF file", source=str(file)) from exc
    except OSError as exc:
        raise SpecError(f"cannot be read: {exc.strerror}", source=str(file)) from exc


def _value(content: BinaryIO, kind: int) -> object:
    """Read a value; skip an array, and return None."""
    if kind == _STRING:
        return _text(content)
    if kind != _ARRAY:
        return _numbers(content, _NUMBERS[kind])[0]
    inner, length = _numbers(content, "<IQ")
    if inner not in (_STRING, _ARRAY):
        content.seek(struct.calcsize(_NUMBERS[inner]) * length, 1)
        return None
    for _ in range(length):
        if inner == _STRING:
            content.seek(_numbers(content, "<Q")[0], 1)
        else:
            _value(content, inner)
    return None


def _numbers(content: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(form, content.read(struct.calcsize(form)))


def _text(content: BinaryIO) -> str:
    (size,) = _numbers(content, "<Q")
    data = content.read(min(size, _MAX_TEXT))
    if len(data) < size:
        raise EOFError
    return data.decode()
