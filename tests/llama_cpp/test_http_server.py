"""llama.cpp's HTTP server through `kind: openai`."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fedone_sdk.backends import LLMBackend, Query
from fedone_sdk.backends.build import build_backend
from fedone_sdk.backends.queries import run_each, score_all
from fedone_sdk.budget import NOTHING, Budget, BudgetGuard
from fedone_sdk.errors import BackendBlocked, LabelsNotShown
from fedone_sdk.spec import BackendSpec
from fedone_sdk.task import Part
from tests.llama_cpp.conftest import ALIAS, CONTEXT, LlamaServer

WORDS = (" no", " yes")
NEVER = (" zyzzyva", " qoph")
TEXTS = ("a fine film", "a dull film", "I want my money back", "the best of the year")
QUESTION = "Review: {} Was the customer pleased? Answer yes or no."


class Sent:
    """Counts the requests that reach the adapter, and how they end."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()

    @property
    def number(self) -> int:
        return self.ends.total()

    @contextmanager
    def __call__(self, _backend: LLMBackend, _query: Query) -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            usage = getattr(exc, "usage", None)
            self.ends["never sent" if usage == NOTHING else type(exc).__name__] += 1
            raise
        self.ends["answered"] += 1


def described(server: LlamaServer, **options: Any) -> BackendSpec:
    return BackendSpec.model_validate(
        {
            "kind": "openai",
            "base_url": f"{server.url}/v1",
            "api_key_env": "LLAMA_KEY",
            "model": ALIAS,
            "max_input_tokens": 300,
            **options,
        }
    )


def query(text: str, words: tuple[str, ...] = WORDS) -> Query:
    return Query(inputs=((Part("field", QUESTION.format(text)),),), label_words=words)


def shown_by_completion(server: LlamaServer, prompt: str, num: int) -> list[tuple[str, float]]:
    """The likeliest tokens and their log-probabilities by llama.cpp's own route."""
    body = {"prompt": prompt, "n_predict": 1, "n_probs": num, "temperature": 1.0}
    first = server.post("/completion", body)["completion_probabilities"][0]
    return [(row["token"], row["logprob"]) for row in first["top_logprobs"]]


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_label_log_probs_are_those_of_the_whole_vocabulary(
    server: LlamaServer, api: str
) -> None:
    async with build_backend(described(server, api=api)) as backend:
        await backend.check(WORDS)
        answers = await score_all(backend, map(query, TEXTS))
    num_shown = 0
    for text, answer in zip(TEXTS, answers, strict=True):
        prompt = QUESTION.format(text)
        if api == "chat":
            messages = [{"role": "user", "content": prompt}]
            prompt = server.post("/apply-template", {"messages": messages})["prompt"]
        top = shown_by_completion(server, prompt, 5000)
        (row,) = answer.log_probs
        assert row is not None
        for word, found in zip(WORDS, row, strict=True):
            spelled = [p for token, p in top if token.strip().lower() == word.strip()]
            among = [p for token, p in top[:20] if token.strip().lower() == word.strip()]
            if among:
                num_shown += 1
                exact = math.log(math.fsum(map(math.exp, among)))
                assert found == pytest.approx(exact, abs=1e-3)
            else:
                assert found >= max(spelled) - 1e-3  # an upper bound of each spelling
        assert answer.usage.completion_tokens == 1
        assert answer.usage.prompt_tokens > 0
    assert num_shown


async def test_a_killed_server_loses_no_answer_and_counts_none_twice(
    own_server: LlamaServer,
) -> None:
    sent, guard = Sent(), BudgetGuard(Budget(requests=10_000))
    spec = described(
        own_server,
        retry={"attempts": 50, "max_wait_s": 1.0, "breaker_failures": 100_000},
        limits={"concurrency": 4},
    )
    asked = [query(f"film {number}") for number in range(24)]
    async with build_backend(spec, guard=guard, watch=sent) as backend:
        before = await score_all(backend, asked[:6])
        rest = asyncio.create_task(score_all(backend, asked[6:]))
        while sent.ends["answered"] < 9:
            await asyncio.sleep(0.01)
        own_server.kill()
        while sent.number == sent.ends["answered"]:  # until a request meets the dead server
            await asyncio.sleep(0.01)
        await asyncio.to_thread(own_server.start)
        after = await rest
    answers = [*before, *after]
    assert len(answers) == len(asked)
    assert all(answer.log_probs[0] is not None for answer in answers)
    # One answer for each query, and each failed attempt that may have been sent is one request.
    assert sent.ends["answered"] == len(asked)
    held = (await guard.account()).held
    assert held.requests == sent.number - sent.ends["never sent"]


async def test_a_wrong_name_is_refused_although_the_server_ignores_names(
    server: LlamaServer,
) -> None:
    body = {"model": "no-such-model", "prompt": "It was", "max_tokens": 1}
    assert server.post("/v1/completions", body)["choices"]
    async with build_backend(described(server, model="no-such-model")) as backend:
        with pytest.raises(BackendBlocked, match=f"does not exist.*models that exist: {ALIAS}"):
            await backend.check(WORDS)


async def test_the_fingerprint_has_the_weights_that_are_served(server: LlamaServer) -> None:
    async with build_backend(described(server)) as backend:
        await backend.check(WORDS)
        host = server.url.removeprefix("http://")
        expected = f"openai:{host}:{ALIAS}:max_input_tokens=300"
        expected += ":n_params=134515008,size=96576768,ftype=Q4_1"
        assert backend.fingerprint == expected


async def test_an_input_beyond_the_context_fails_alone(server: LlamaServer) -> None:
    sent = Sent()
    async with build_backend(described(server, max_input_tokens=100_000), watch=sent) as backend:
        answer = await backend.score(query("word " * 2 * CONTEXT))
        assert answer.log_probs == (None,)
        assert sent.ends["answered"] == 1  # The neutral input, after the long one.
        assert (await backend.score(query("word"))).log_probs[0] is not None


async def test_label_words_that_are_never_shown_end_the_run_early(server: LlamaServer) -> None:
    sent = Sent()
    asked = [query(f"film {number}", NEVER) for number in range(60)]
    async with build_backend(described(server), watch=sent) as backend:
        answers, failures = await run_each(backend.score, asked, concurrency=4)
        assert 33 <= len(answers) == sent.ends["answered"] <= 36  # three others under way
        assert {type(failure) for failure in failures} == {LabelsNotShown}
        assert "33 of the first 33 answers" in str(failures[0])
        assert (await backend.score(query("film", WORDS))).log_probs[0] is not None
