"""The engine llama.cpp in this process, and the metadata of its files. All calls block."""

from __future__ import annotations

import json
import math
import os
import secrets
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fedone_sdk.backends.fitting import CausalEncoder, Encoding
from fedone_sdk.errors import BackendError, SpecError, one_line

_TIMEOUT_S = 60.0
"""Time limit of requests for tokens or a template, which do not wait for the model."""

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens local URLs without the environment's proxy."""

_FIRST_PROBS = 256
"""Number of next tokens to request first. The engine needs about 10 microseconds per token, and
label words are nearly always among these."""

_TIMED_TOKENS = 32

_SURELY = 1e6
"""A logit far above all others."""

_RAISED = 30.0
"""Added to the logits of unlikely tokens, so that a token of probability 1e-13 is shown."""

_BESIDES = 8
"""Number of tokens to show in addition to them."""


_STRING, _ARRAY = 8, 9
# By type number; the missing two have no fixed size.
_NUMBERS = ("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", None, None, "<Q", "<q", "<d")
_MAX_TEXT = 1 << 24


class Written(NamedTuple):
    """A generated text without special tokens, and its number of tokens, the end token included."""

    text: str
    num_tokens: int


class LlamaEngine:
    """A loaded model.

    Queries call the engine directly. Tokenisation and the chat template are only available through
    the engine's HTTP server, which listens on loopback with a random key.

    Sequences are computed one at a time, and each reuses the prefix that it shares with the
    previous one. The first sequence of a call reuses nothing, so that results do not depend on
    earlier calls.

    Args:
        file: The model.
        context_length: Tokens of the longest sequence.
        threads: CPU threads.
        exact: Whether attention is computed in float32. Half precision, the engine's default, is a
            fifth faster and changes log-probabilities by 0.01 nats, less than quantised weights do.
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
        # State of an earlier call must not change an answer.
        params.cache_ram_mib = 0
        # With the full cache a sliding-window model can resume from any earlier token.
        params.swa_full = True
        params.verbosity = -1  # stderr is not ours.
        params.ui = False
        params.endpoint_slots = False
        params.api_keys = [self._key]
        try:
            self._server = engine.Server(params)
        except RuntimeError as exc:
            raise BackendError(
                f"{file.name}: llama.cpp cannot load the model: it does not know the architecture, "
                "the file is damaged, or the memory does not suffice for it and for "
                f"{context_length} tokens of context (backend.max_input_tokens)"
            ) from exc
        self._url = str(self._server.listening_address)
        self.context_length = context_length
        (model,) = self._request("/v1/models")["data"]
        self.num_vocab = int(model["meta"]["n_vocab"])
        self._sampled = self.tokenise("a")[-1][0]
        self._bos = str(self._request("/props")["bos_token"])

    def pass_s(self) -> float:
        """Return the seconds of a pass over some tokens; the first pass of a model is not timed."""
        for _ in range(2):
            start = time.perf_counter()
            self._shown([self._sampled] * min(_TIMED_TOKENS, self.context_length // 2), fresh=True)
        return time.perf_counter() - start

    def next_log_probs(
        self, prompts: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Return the log-probabilities of the `wanted` tokens after each prompt, nats."""
        found = []
        for number, (prompt, tokens) in enumerate(zip(prompts, wanted, strict=True)):
            shown = self._shown(prompt, fresh=number == 0)
            if not all(token in shown for token in tokens):
                shown |= self._unlikely(prompt, tokens, shown)
            if not all(token in shown for token in tokens):
                shown = self._shown(prompt, fresh=False, num_probs=self.num_vocab)
            found.append([shown[token] for token in tokens])
        return found

    def _unlikely(
        self, prompt: Sequence[int], tokens: Sequence[int], shown: Mapping[int, float]
    ) -> dict[int, float]:
        """Log-probabilities of tokens that are not among the most likely, as far as they are shown.

        A bias raises the tokens' logits until they are shown together with a token of known
        log-probability. The difference to that token, minus the bias, gives the log-probability.
        Only the last token of the prompt, which is that of the previous call, is computed again.
        """
        choice = self._complete(
            prompt,
            fresh=False,
            n_predict=1,
            n_probs=len(tokens) + _BESIDES,
            samplers=[],
            post_sampling_probs=True,
            logit_bias=[[token, _RAISED] for token in dict.fromkeys(tokens)],
        )
        if choice["logprobs"] is None:  # It sampled a part of a character.
            return {}
        top = {one["id"]: one["prob"] for one in choice["logprobs"]["content"][0]["top_probs"]}
        known = [token for token in top if token in shown and token not in tokens and top[token]]
        if not known:
            return {}
        origin = shown[known[0]] - math.log(top[known[0]]) - _RAISED
        return {token: origin + math.log(top[token]) for token in tokens if top.get(token)}

    def _shown(
        self, prompt: Sequence[int], *, fresh: bool, num_probs: int = _FIRST_PROBS
    ) -> dict[int, float]:
        """Return the most likely next tokens after a prompt, and their log-probabilities."""
        # Sampling is restricted to one token, because the engine shows nothing for a token that is
        # a part of a character. The log-probabilities are those before sampling.
        choice = self._complete(
            prompt,
            fresh=fresh,
            n_predict=1,
            n_probs=num_probs,
            samplers=[],
            logit_bias=[[self._sampled, _SURELY]],
        )
        shown = choice["logprobs"]["content"][0]["top_logprobs"]
        return {one["id"]: one["logprob"] for one in shown}

    def write(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[str] = ()
    ) -> list[Written]:
        """Generate greedily after each prompt, up to one of the stop texts."""
        found = []
        for prompt in prompts:
            # Without prefix reuse, so that a text does not depend on earlier ones.
            choice = self._complete(
                prompt, fresh=True, n_predict=max_tokens, n_probs=1, temperature=0, stop=list(stop)
            )
            found.append(Written(choice["text"], len(choice["logprobs"]["content"])))
        return found

    def _complete(self, prompt: Sequence[int], *, fresh: bool, **options: object) -> dict[str, Any]:
        answer = self._server.handle_completions(
            {"prompt": [list(prompt)], "cache_prompt": not fresh, **options}
        )
        choices = answer.get("choices")
        if not isinstance(choices, list):
            said = answer.get("error", {}).get("message", "no answer")
            raise BackendError(f"{self.name}: llama.cpp failed: {said}")
        (choice,) = choices
        return dict(choice)

    def tokenise(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[tuple[int, str]]:
        """Return the tokens of a text, with the text of each."""
        found = self._request(
            "/tokenize",
            {
                "content": text,
                "add_special": add_special,
                "parse_special": parse_special,
                "with_pieces": True,
            },
        )
        # A token that is a part of a character is reported as bytes.
        return [
            (one["id"], piece if isinstance(piece := one["piece"], str) else bytes(piece).hex())
            for one in found["tokens"]
        ]

    def apply_template(self, messages: list[dict[str, str]]) -> str:
        """Apply the model's chat template to messages."""
        text = str(self._request("/apply-template", {"messages": messages})["prompt"])
        # The engine omits the start token, which its server adds later.
        starts = bool(self.tokenise("", add_special=True))
        return f"{self._bos}{text}" if starts and not text.startswith(self._bos) else text

    def _request(self, path: str, body: object = None) -> dict[str, Any]:
        """Return the answer of the engine's HTTP server: GET without a body, else POST."""
        request = urllib.request.Request(
            self._url + path,
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
        )
        try:
            with _DIRECT.open(request, timeout=_TIMEOUT_S) as response:
                found: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as exc:
            with exc:
                said = _message(exc.read()) or f"status {exc.code}"
            what = "the chat template refuses the task's messages" if "template" in path else path
            raise BackendError(f"{self.name}: {what}: {said}") from exc
        except (OSError, ValueError) as exc:
            reason = type(exc).__name__
            raise BackendError(f"{self.name}: llama.cpp does not answer: {reason}") from exc
        return found


def _message(body: bytes) -> str:
    try:
        return one_line(json.loads(body)["error"]["message"])
    except (LookupError, TypeError, ValueError):
        return ""


def _engine() -> Any:
    """Return the engine's module.

    Its threads synchronise after each operation, and spin meanwhile with OpenMP's default setting.
    Another busy process on the same cores then makes the model tens of times slower. The setting
    here lets threads sleep after a short spin. OpenMP reads it on load.
    """
    name = "GOMP_SPINCOUNT"
    if name in os.environ or "OMP_WAIT_POLICY" in os.environ:
        return import_module("xllamacpp")
    os.environ[name] = "1000"
    try:
        return import_module("xllamacpp")
    finally:
        del os.environ[name]


class _Tokeniser:
    def __init__(self, engine: LlamaEngine) -> None:
        self._engine = engine
        self.names: dict[int, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        if not text and not add_special_tokens:
            return Encoding([], [])
        text.encode()  # The server would replace a lone surrogate.
        found = self._engine.tokenise(text, add_special=add_special_tokens)
        self.names.update(found)
        return Encoding.spread(text, [token for token, _ in found])

    def token_to_id(self, special: str) -> int:
        ((token, _),) = self._engine.tokenise(special, parse_special=True)
        return token

    def id_to_token(self, token_id: int) -> str:
        return self.names[token_id]


class GgufEncoder(CausalEncoder):
    """Encoder for the model of an engine, whose file may have a chat template."""

    def __init__(self, engine: LlamaEngine, *, has_template: bool) -> None:
        self._engine = engine
        self._tokenizer: Any = _Tokeniser(engine)
        self._max_length = engine.context_length
        self._apply_template = engine.apply_template if has_template else None
        self.frames = {}
        self._place_special_tokens(Path(engine.name))

    def special_names(self, text: str) -> list[str]:
        """Return the special tokens in a text, which plain text does not have."""
        found = dict(self._engine.tokenise(text, parse_special=True))
        return [
            name
            for token, name in found.items()
            if [token] != [one for one, _ in self._engine.tokenise(name)]
        ]


# The engine silently substitutes a default for a missing chat template, so the file is read here.
# The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md


def read_gguf(file: Path, keys: Collection[str]) -> dict[str, object]:
    """Return the values of these keys in a GGUF file's metadata, of those that the file has."""
    try:
        with file.open("rb") as content:
            if content.read(4) != b"GGUF":
                raise SpecError("is no GGUF file", source=str(file))
            version, _, num_pairs = struct.unpack("<IQQ", content.read(20))
            if version < 2:
                raise SpecError(f"is a GGUF file of version {version}; needs 2", source=str(file))
            found: dict[str, object] = {}
            for _ in range(num_pairs):
                key = _text(content)
                value = _value(content, _number(content, "<I"))
                if key in keys and value is not None:
                    found[key] = value
            return found
    except (EOFError, struct.error, UnicodeDecodeError) as exc:
        raise SpecError("is a damaged GGUF file", source=str(file)) from exc
    except OSError as exc:
        raise SpecError(f"cannot be read: {exc.strerror}", source=str(file)) from exc


def _value(content: BinaryIO, kind: int) -> object:
    if kind == _STRING:
        return _text(content)
    if kind != _ARRAY:
        return _number(content, _form(kind))
    inner, length = _number(content, "<I"), _number(content, "<Q")
    if inner not in (_STRING, _ARRAY):
        content.seek(struct.calcsize(_form(inner)) * length, 1)
        return None
    for _ in range(length):
        if inner == _STRING:
            content.seek(_number(content, "<Q"), 1)
        else:
            _value(content, inner)
    return None


def _form(kind: int) -> str:
    form = _NUMBERS[kind] if kind < len(_NUMBERS) else None
    if form is None:
        raise EOFError
    return form


def _number(content: BinaryIO, form: str) -> int:
    found: int = struct.unpack(form, content.read(struct.calcsize(form)))[0]
    return found


def _text(content: BinaryIO) -> str:
    size = _number(content, "<Q")
    if size > _MAX_TEXT:
        raise EOFError
    data = content.read(size)
    if len(data) < size:
        raise EOFError
    return data.decode()
