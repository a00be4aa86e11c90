"""A real LiteLLM proxy between `kind: openai` and the fake server; run by scripts/test-litellm."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fedone_sdk.backends import LLMBackend, Query
from fedone_sdk.backends.build import build_backend
from fedone_sdk.budget import Budget, BudgetGuard, Usage
from fedone_sdk.errors import BackendBlocked, BackendError, BackendUnavailable, BudgetExhausted
from fedone_sdk.spec import BackendSpec
from fedone_sdk.task import Part
from tests.fake_openai import FakeOpenAI, Script
from tests.processes import free_port

PROXY = os.environ.get("FEDONE_LITELLM") or shutil.which("litellm")

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(PROXY is None, reason="scripts/test-litellm installs litellm[proxy]"),
]

KEY = "sk-proxy-0123456789abcdef"
QUERY = Query(
    inputs=((Part("prompt", "Decide: "), Part("field", "a fine film")),),
    label_words=(" terrible", " great"),
)
START_S = 120


@asynccontextmanager
async def proxied(upstream: str, folder: Path) -> AsyncIterator[str]:
    """The base URL of a proxy in front of `upstream`'s model ``fake``."""
    config = folder / "config.yaml"
    # As docs/backends/litellm.md has it.
    config.write_text(
        json.dumps(
            {
                "model_list": [
                    {
                        "model_name": "fake",
                        "litellm_params": {
                            "model": "openai/fake-1",
                            "api_base": upstream,
                            "api_key": "none",
                        },
                    }
                ],
                "litellm_settings": {"num_retries": 0, "request_timeout": 60},
                "router_settings": {"num_retries": 0, "disable_cooldowns": True},
                "general_settings": {"master_key": KEY},
            }
        )
    )
    port = free_port()
    log = (folder / "proxy.log").open("wb")
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environment.pop("PYTHONPATH", None)
    process = await asyncio.create_subprocess_exec(
        *[str(PROXY), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)],
        stdout=log,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        cwd=folder,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(START_S):
            while True:
                assert process.returncode is None, (folder / "proxy.log").read_text()
                try:
                    async with session.get(f"{url}/health/liveliness") as answer:
                        if answer.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.5)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        log.close()


@pytest.fixture(scope="module")
def keys() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_PROXY_KEY", KEY)
        patch.setenv("TEST_WRONG_KEY", "sk-wrong")
        yield


def asking(url: str, **options: Any) -> BackendSpec:
    return BackendSpec.model_validate(
        {
            "kind": "openai",
            "model": "fake",
            "base_url": url,
            "api_key_env": "TEST_PROXY_KEY",
            "retry": {"attempts": 1},
            **options,
        }
    )


def built(url: str, guard: BudgetGuard | None = None, **options: Any) -> LLMBackend:
    return build_backend(asking(url, **options), guard=guard)


async def test_a_model_behind_the_proxy_is_queried_as_directly(keys: Any, tmp_path: Path) -> None:
    """One start of the proxy for all."""
    async with FakeOpenAI(script=Script()) as server, proxied(server.base_url, tmp_path) as url:
        # The list of models is free, and scores are those of the server itself.
        async with built(url) as backend:
            await backend.check(QUERY.label_words)
            answer = await backend.score(QUERY)
        direct = BackendSpec(
            kind="openai", model="fake-1", base_url=server.base_url, api_key_env=None
        )
        async with build_backend(direct) as backend:
            expected = await backend.score(QUERY)
        assert answer.log_probs == expected.log_probs
        assert answer.usage == expected.usage
        assert len(server.received) == 2

        # Without log-probabilities the label is what the model writes.
        async with built(url, log_probs=False) as backend:
            written = replace(QUERY, want="choice")
            assert (await backend.score(written)).log_probs[0] is not None

        # What the proxy refuses is known, and costs nothing.
        async with built(url, api_key_env="TEST_WRONG_KEY") as backend:
            with pytest.raises(BackendError, match="HTTP 400") as refused:  # 401 with a database
                await backend.score(QUERY)
            assert "sk-" not in str(refused.value)
        async with built(url, model="other") as backend:
            with pytest.raises(BackendBlocked, match="fake"):
                await backend.check(QUERY.label_words)

        # A failure behind the proxy goes out once, and counts.
        before = len(server.received)
        server.script = Script(default="error")
        guard = BudgetGuard(Budget(requests=3))
        async with built(url, guard) as backend:
            with pytest.raises(BackendUnavailable):
                await backend.score(QUERY)
        assert len(server.received) == before + 1
        assert (await guard.account()).spent.requests == 1

        # The cap holds for many at once.
        server.script = Script()
        before = len(server.received)
        guard = BudgetGuard(Budget(requests=5))
        queries = [
            Query(inputs=((Part("field", f"film {number}"),),), label_words=QUERY.label_words)
            for number in range(20)
        ]
        async with built(url, guard) as backend:
            found = await asyncio.gather(
                *(backend.score(query) for query in queries), return_exceptions=True
            )
        assert sum(isinstance(end, BudgetExhausted) for end in found) == 15
        assert len(server.received) == before + 5
        account = await guard.account()
        assert account.spent.requests == 5
        assert account.leased == Usage()
