"""A vLLM server: the description of its model, and its tokeniser."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedone_sdk.backends.fitting import CausalEncoder, Encoding, check_unicode
from fedone_sdk.backends.openai_http import ModelServer
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendBlocked

# Tokenisers differ in scripts, numbers, line breaks and runs of spaces.
PROBE = "The film's  cast: 3 naïve\n actors, 1 24 日本 Ω."
"""A text that tells tokenisers apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A server's description of its model.

    Attributes:
        root: The model's folder or its name on the hub, as configured on the server.
        start: The special tokens that the server puts before a text.
        probe: The server's tokens of `PROBE`, without special tokens.
    """

    root: str
    max_length: int
    version: str
    masked: bool
    start: list[int]
    probe: list[int]


class VllmServer(ModelServer):
    """A vLLM server, for one of its models.

    Attributes:
        url: The server's root, without ``/v1``.
    """

    def __init__(
        self, model: str, *, base_url: str, api_key_env: str | None, timeout_s: float
    ) -> None:
        root = base_url.rstrip("/").removesuffix("/v1")
        super().__init__(model, base_url=f"{root}/v1", api_key_env=api_key_env, timeout_s=timeout_s)
        self.url = root

    async def describe(self) -> ServedModel:
        """Fetch the description of the model."""
        listed = (await self.get("/v1/models")).get("data")
        cards = listed if isinstance(listed, list) else []
        names = {card.get("id"): card for card in cards if isinstance(card, dict)}
        card = names.get(self.model)
        if card is None:
            raise BackendBlocked(
                f"there is no model {self.model!r}, only "
                f"{', '.join(map(repr, names)) or 'none'}: change model",
                url=self.url,
            )
        if not isinstance(card.get("max_model_len"), int):
            raise self._no_vllm()
        probe, _ = await self.tokenise(PROBE)
        whole, _ = await self.tokenise(PROBE, special=True)
        before = next(
            (n for n in range(len(whole)) if whole[n : n + len(probe)] == probe), len(whole)
        )
        return ServedModel(
            root=str(card.get("root") or self.model),
            max_length=card["max_model_len"],
            version=str((await self.get("/version")).get("version")),
            masked=await self._is_masked(),
            start=whole[:before],
            probe=probe,
        )

    async def tokenise(self, text: str, *, special: bool = False) -> tuple[list[int], list[str]]:
        """Return the ids and names of a text's tokens."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": special}
        found = await self.post("/tokenize", {**body, "return_token_strs": True})
        ids, names = found.get("tokens"), found.get("token_strs")
        if not isinstance(ids, list) or not isinstance(names, list) or len(ids) != len(names):
            raise self._no_vllm()
        return ids, names

    async def apply_template(self, messages: list[dict[str, str]]) -> str | None:
        """Apply the server's chat template to messages."""
        import openai

        answered = messages[-1]["role"] == "assistant"
        body = {
            "model": self.model,
            "messages": messages,
            "add_generation_prompt": not answered,
            "continue_final_message": answered,
        }
        with self.translated():
            try:
                ids = (await self.send("/tokenize", body)).get("tokens")
            except openai.APIStatusError as exc:
                if exc.status_code not in (400, 422):
                    raise
                return None
            text = (await self.send("/detokenize", {"model": self.model, "tokens": ids})).get(
                "prompt"
            )
        if not isinstance(text, str):
            raise self._no_vllm()
        return text

    def unreadable(self, usage: Usage | None = None) -> BackendBlocked:
        """Return the error for an answer without the requested log-probabilities."""
        return BackendBlocked(
            "the answer is not that of a vLLM with log-probabilities of chosen "
            "tokens: update the server (0.32 is known to work), or check base_url",
            url=self.url,
            usage=usage,
        )

    async def _is_masked(self) -> bool:
        import openai

        with self.translated():
            try:
                await self.send("/pooling", {"model": self.model, "data": {}})
            except openai.APIStatusError as exc:
                if exc.status_code in (403, 404, 405):
                    return False  # Causal; a proxy may hide this endpoint.
                if exc.status_code == 400 and "token_ids" in self.message_of(exc):
                    return True
                if exc.status_code not in (400, 422, 501):
                    raise
        raise BackendBlocked(
            f"the model {self.model!r} neither generates, nor runs behind the "
            "SDK's plugin: start vLLM with --io-processor-plugin fedone_roberta",
            url=self.url,
        )

    def _no_vllm(self) -> BackendBlocked:
        return BackendBlocked("this is not a vLLM server: change base_url", url=self.url)


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
        """Return the tokens of a text, without special tokens."""
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
