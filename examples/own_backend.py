"""An adapter to another API, behind the SDK's `ModelClient`.

python examples/own_backend.py examples/zero_one/RUN.yaml http://127.0.0.1:9000

The API in this example is `POST /rank`, with {"texts": [...], "words": [...]} as the request and
{"log_probs": [[...]], "tokens": 12} (nats) as the response. `ModelClient` splits queries, and adds
cache, retries and budget. The program prints the tuned prompt and its cost.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp

from fedone_sdk import LLMBackend, RunSpec, Usage
from fedone_sdk.backends import Answer, AnswerCache, ModelClient, Query
from fedone_sdk.errors import BackendError, BackendUnavailable
from fedone_sdk.local import Federation, simulate
from fedone_sdk.spec import RetrySpec


class RankingService(LLMBackend):
    """Calls the service; each call of `score` is one request."""

    max_inputs = 8  # `ModelClient` splits larger mini-batches

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    @property
    def fingerprint(self) -> str:
        """Identifies the exact model."""
        return f"ranking-service {self._url} v1"

    async def score(self, query: Query) -> Answer:
        """Send a query; `BackendUnavailable` marks failures that are retried."""
        texts = ["".join(part.text for part in parts) for parts in query.inputs]
        body = {"texts": texts, "words": query.label_words}
        self._session = self._session or aiohttp.ClientSession(self._url)
        try:
            async with self._session.post("/rank", json=body) as response:
                if response.status in (429, 503):
                    wait_s = float(response.headers.get("Retry-After", 1))
                    raise BackendUnavailable("the service is busy", retry_after_s=wait_s)
                if response.status != 200:
                    raise BackendError(f"the service answers {response.status}")
                found = await response.json()
        except aiohttp.ClientError as exc:
            raise BackendUnavailable("the service cannot be reached") from exc
        rows = tuple(None if row is None else tuple(row) for row in found["log_probs"])
        return Answer(log_probs=rows, usage=Usage(requests=1, prompt_tokens=found["tokens"]))

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


async def tune(run: Path, url: str) -> None:
    """Run a RUN.yaml with another backend."""
    federation = Federation.load(RunSpec.load(run), run.parent)
    backend = ModelClient(RankingService(url), cache=AnswerCache(), retry=RetrySpec())
    async with backend:
        result = await simulate(federation, backend=backend)
    print(f"{result.status}: {result.prompt.text!r}")
    print(f"accuracy {result.metric.no_prompt} -> {result.metric.after}")
    print(f"{result.spent.queries} queries, {result.spent.requests} requests")


if __name__ == "__main__":
    asyncio.run(tune(Path(sys.argv[1]), sys.argv[2]))
