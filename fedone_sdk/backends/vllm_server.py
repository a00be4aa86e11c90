"""A vLLM server: the description of its model, its tokeniser and its chat template."""

from __future__ import annotations

from dataclasses import dataclass

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
        probe = await self._tokenise(PROBE)
        whole = await self._tokenise(PROBE, special=True)
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

    async def _tokenise(self, text: str, *, special: bool = False) -> list[int]:
        body = {"model": self.model, "prompt": text, "add_special_tokens": special}
        ids = (await self.post("/tokenize", body)).get("tokens")
        if not isinstance(ids, list):
            raise self._no_vllm()
        return ids

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
