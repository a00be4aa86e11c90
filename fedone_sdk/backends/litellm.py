"""The models of all providers that LiteLLM knows."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from decimal import Decimal
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from aiohttp import ClientConnectorError, ClientOSError

from fedone_sdk.backends._hosted import MAX_INPUT_TOKENS, HostedBackend, RawAnswer
from fedone_sdk.backends._secrets import without_secrets
from fedone_sdk.backends._wire import Wire, wire
from fedone_sdk.backends.openai_api import read_key
from fedone_sdk.backends.tokens import CHAT_OVERHEAD, OPENAI_CHAT_OVERHEAD
from fedone_sdk.budget import Price, PriceTier
from fedone_sdk.errors import BackendBlocked, BackendUnavailable, MissingExtraError, SpecError

if TYPE_CHECKING:
    import openai

__all__ = ["LiteLLMBackend", "the_package"]

# Where a provider has no schemas LiteLLM asks for the call of a tool. Anthropic's text about tools
# is the longest, 530 tokens by its documentation.
_TOOL_OVERHEAD = 600
# It searches the web for each answer, and takes money for that.
_SEARCHES = "perplexity"
# They write long prompts to their caches unasked, some at a price of its own.
_CACHES = ("azure", "openai")
_CACHED = 1024
"""Tokens of the shortest prompt that they write."""
# No fetching while it is imported, and no reading of ``.env``.
_AT_HOME = {
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_MODE": "PRODUCTION",
}
# What would show prompts to others, or send them to another model.
_FOREIGN = (
    "callbacks", "failure_callback", "input_callback", "model_fallbacks", "success_callback",
)  # fmt: skip


class LiteLLMBackend(HostedBackend):
    """Asks through LiteLLM; one input is one request, in OpenAI's form.

    LiteLLM translates, and does nothing else here: no retries, cache, fallbacks or callbacks. Each
    request goes out once, and what came back is judged by what was seen on the wire. As to
    log-probabilities and refusals it is as `OpenAIBackend` is.

    Args:
        model: ``PROVIDER/MODEL``, as LiteLLM names it.
        base_url: Null is where LiteLLM asks that provider.
        api_key_env: Environment variable that holds the key. None lets LiteLLM read the
            provider's own; with `base_url` none is sent then.
        log_probs: Whether the model shows log-probabilities; without them it answers ``choice``
            instead of ``labels``.
        structured: For ``choice``: whether a JSON schema holds the answer to the label words.
        reasoning_effort: Sent where it is not None.
        max_input_tokens: The longest input, without the frame of the message. Longer ones lose
            the ends of their text fields.
        tokenizer: ``tokenizer.json`` to count with, or a folder with it; None looks for one by the
            model's name, takes tiktoken, or counts bytes.
        timeout_s: Until an unanswered request counts as failed.

    Raises:
        MissingExtraError: The extra ``litellm`` is not installed.
        SpecError: LiteLLM does not know the provider, or it lacks what is asked for; there is no
            key, or no such tokeniser; this process has given LiteLLM callbacks or fallbacks.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key_env: str | None = None,
        log_probs: bool = True,
        structured: bool = True,
        reasoning_effort: str | None = None,
        max_input_tokens: int = MAX_INPUT_TOKENS,
        tokenizer: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._litellm = the_package()
        self._name = model
        self._base_url = base_url
        bare, self._provider = self._found(model)
        self._refuse_foreign()
        self._refuse_unsupported(
            bare,
            log_probs=log_probs,
            response_format=structured and not log_probs,
            reasoning_effort=reasoning_effort is not None,
        )
        self._key: str | None = None
        if api_key_env is not None:
            self._key = read_key(api_key_env)
        elif base_url is not None:
            self._key = "none"  # Else a key from the environment would go to somebody's server.
        else:
            self._refuse_missing_key(model)
        plain = self._provider == "openai" and base_url is None
        overhead = OPENAI_CHAT_OVERHEAD if plain else CHAT_OVERHEAD
        if structured and not log_probs and not plain:
            overhead += _TOOL_OVERHEAD
        super().__init__(
            bare,
            url=base_url or f"LiteLLM ({self._provider})",
            key_env=api_key_env,
            api="chat",
            log_probs=log_probs,
            structured=structured,
            reasoning_effort=reasoning_effort,
            max_input_tokens=max_input_tokens,
            overhead=overhead,
            tokenizer=tokenizer,
            timeout_s=timeout_s,
        )

    @property
    def fingerprint(self) -> str:
        """``litellm:PROVIDER/MODEL``, with the host of `base_url` in between where there is one.

        Settings that move scores follow where they are not the default.
        """
        host = "" if self._base_url is None else urlsplit(self._base_url).netloc + ":"
        return f"litellm:{host}{self._name}{self._manner}"

    @property
    def price(self) -> Price | None:
        """What LiteLLM's table says that the model costs at most; None where it does not say.

        Nothing is no price: the table has it for models of one's own, and for those whose price
        its authors do not know. Nor is another server's price known by the model's name.
        """
        if self._base_url is not None and self._provider != "azure":
            return None
        table: Mapping[str, Mapping[str, Any]] = self._litellm.model_cost
        row = table.get(self._name) or table.get(self._model)
        if row is None or row.get("litellm_provider") not in (self._provider, None):
            return None
        longest = self._max_input_tokens + self._overhead
        request = _most(row, "input_cost_per_request", longest)
        if self._provider == _SEARCHES:
            searches = (row.get("search_context_cost_per_query") or {}).values()
            request += max((Decimal(repr(usd)) for usd in searches), default=Decimal(0))
        return price_of(row, longest, request=request, caches=self._provider in _CACHES)

    async def _complete(self, body: Mapping[str, Any]) -> RawAnswer:
        self._refuse_foreign()
        json.dumps(body, ensure_ascii=False).encode()  # Text that cannot be sent is seen here.
        with wire() as seen:
            try:
                found = await self._litellm.acompletion(
                    **{**body, "model": self._name},
                    api_base=self._base_url,
                    api_key=self._key,
                    timeout=self._timeout_s,
                    num_retries=0,
                    max_retries=0,
                    caching=False,
                    drop_params=False,
                )
            except Exception as exc:
                failed = self._seen(exc, seen)
                raise failed from failed.__cause__  # LiteLLM's own says less, and may quote more.
        if seen.response is None:
            raise BackendBlocked(
                "LiteLLM asks this provider in a way that cannot be watched, so no "
                "cap would hold: take another provider",
                url=self._url,
            )
        answer = found.model_dump(mode="json")
        usage = answer.get("usage")
        if isinstance(usage, dict) and not usage.get("prompt_tokens"):
            answer["usage"] = None  # What it puts where the provider says nothing.
        for choice in answer["choices"]:
            message = choice["message"]
            fields = message.get("provider_specific_fields") or {}
            message["refusal"] = message.get("refusal") or fields.get("refusal")
        return _Raw(json.dumps(answer).encode(), seen.response.headers)

    def _seen(self, exc: Exception, seen: Wire) -> Exception:
        """What a failure really was."""
        import openai

        if seen.response is not None:
            if seen.response.status_code >= 300:
                return _refusal(seen.response)
            return BackendUnavailable(
                "the answer is cut off or not a completion (if that stays so, check "
                "model and base_url)",
                url=self._url,
            )
        if seen.failure is not None:
            unknown: Any = None
            failed: openai.APIConnectionError = (
                openai.APITimeoutError(unknown)
                if "Timeout" in type(seen.failure).__name__
                else openai.APIConnectionError(request=unknown)
            )
            failed.__cause__ = cause = seen.failure
            broke = cause.__cause__
            in_use = isinstance(broke, ClientOSError | asyncio.CancelledError)
            if in_use and not isinstance(broke, ClientConnectorError):
                failed.__cause__ = broke  # LiteLLM calls that a connection that was not made.
            return failed
        return BackendBlocked(
            f"LiteLLM does not send this for model {self._name!r}",
            url=self._url,
            said=_one_line(str(exc), self._key_env),
        )

    def _found(self, model: str) -> tuple[str, str]:
        """The model's name without its provider, and the provider."""
        try:
            bare, provider, *_ = self._litellm.get_llm_provider(model)
        except Exception:
            provider = model.partition("/")[0]
            raise SpecError(
                f"model: LiteLLM does not know the provider {provider!r}: it must be "
                "PROVIDER/MODEL, as in https://docs.litellm.ai/docs/providers",
                source="backend",
            ) from None
        return str(bare), str(provider)

    def _refuse_foreign(self) -> None:
        set_ = [name for name in _FOREIGN if getattr(self._litellm, name, None)]
        if set_:
            raise SpecError(
                f"kind: litellm.{set_[0]} is set in this process, and would see prompts or answer "
                "in the model's place: take it out, or run this in a process of its own",
                source="backend",
            )

    def _refuse_unsupported(
        self, bare: str, *, log_probs: bool, response_format: bool, reasoning_effort: bool
    ) -> None:
        has = self._litellm.get_supported_openai_params(
            model=bare, custom_llm_provider=self._provider
        )
        has = set(has or ())
        if log_probs and not {"logprobs", "top_logprobs"} <= has:
            raise SpecError(
                f"log_probs: by LiteLLM, {self._name} shows no log-probabilities of the likeliest "
                "tokens: set log_probs: false with loss: zero_one (or score), or take another "
                "model",
                source="backend",
            )
        if response_format and "response_format" not in has:
            raise SpecError(
                f"structured: by LiteLLM, {self._name} takes no JSON schema: set structured: false",
                source="backend",
            )
        if reasoning_effort and "reasoning_effort" not in has:
            raise SpecError(
                f"reasoning_effort: by LiteLLM, {self._name} does not take it: leave it out",
                source="backend",
            )

    def _refuse_missing_key(self, model: str) -> None:
        missing = self._litellm.validate_environment(model=model)["missing_keys"]
        if missing:
            raise SpecError(
                f"api_key_env: LiteLLM needs {' and '.join(missing)} in the environment for "
                f"{model}; put the key there, or name another variable",
                source="backend",
            )


class _Raw(NamedTuple):
    content: bytes
    headers: Mapping[str, str]


def the_package() -> Any:
    """The package, which is told to keep to itself.

    Raises:
        MissingExtraError: It is not installed.
    """
    if find_spec("litellm") is None:
        raise MissingExtraError("a model through LiteLLM", extra="litellm")
    for name, value in _AT_HOME.items():
        os.environ.setdefault(name, value)  # Some of it is read when a model is asked.
    import litellm

    litellm.suppress_debug_info = True  # It prints where it may be reached, at each error.
    litellm.disable_hf_tokenizer_download = True  # It counts tokens of its own.
    return litellm


def _refusal(response: Any) -> openai.APIStatusError:
    """The refusal that came back."""
    import openai

    try:
        error = response.json()
    except Exception:  # Not read, not JSON, not text.
        error = None
    error = error[0] if isinstance(error, list) and error else error
    error = error.get("error", error) if isinstance(error, dict) else error
    error = {"message": error} if isinstance(error, str) else error
    kind = openai.AuthenticationError if response.status_code == 401 else openai.APIStatusError
    return kind("refused", response=response, body=error)


def _one_line(text: str, key_env: str | None) -> str:
    line = without_secrets(" ".join(text.split()), key_env)
    return line if len(line) <= 200 else line[:197] + "..."


def price_of(
    row: Mapping[str, Any], longest: int, *, request: Decimal = Decimal(0), caches: bool = False
) -> Price | None:
    """The price of a model by its row in LiteLLM's table; None where the row has none.

    Args:
        row: US dollars per token.
        longest: Tokens of the longest input.
        request: US dollars per request.
        caches: Whether the provider writes prompts to its cache unasked.
    """

    def prompt(num_tokens: int) -> Decimal:
        writes = caches and num_tokens >= _CACHED
        names = ("input_cost_per_token", "cache_creation_input_token_cost")[: 1 + writes]
        return max(_most(row, name, num_tokens) for name in names).scaleb(6)

    def completion(num_tokens: int) -> Decimal:
        names = ("output_cost_per_token", "output_cost_per_reasoning_token")
        return max(_most(row, name, num_tokens) for name in names).scaleb(6)

    if not prompt(1) or not completion(1):
        return None
    steps = {1000 * int(step) for key in row for step in re.findall(r"_above_(\d+)k_tokens$", key)}
    tiers = [
        PriceTier(above=above, prompt=prompt(above + 1), completion=completion(above + 1))
        for above in sorted({*steps, _CACHED - 1})
        if above < longest
    ]
    price = Price(prompt=prompt(1), completion=completion(1), request=request)
    rates: list[Price | PriceTier] = [price, *tiers]
    dearer = tuple(
        tier
        for before, tier in zip(rates, tiers, strict=False)
        if (tier.prompt, tier.completion) != (before.prompt, before.completion)
    )
    return price.model_copy(update={"tiers": dearer})


def _most(row: Mapping[str, Any], name: str, num_tokens: int) -> Decimal:
    """A price, US dollars, of an input up to so long (``..._above_200k_tokens``)."""
    steps = re.compile(rf"{name}(?:_above_(\d+)k_tokens)?")
    found = ((steps.fullmatch(key), usd) for key, usd in row.items() if usd)
    usds = [usd for step, usd in found if step and 1000 * int(step[1] or 0) < num_tokens]
    return max((Decimal(repr(usd)) for usd in usds), default=Decimal(0))
