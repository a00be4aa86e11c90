"""Observation of a service: metrics, traces, log lines."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from fedone_sdk.aggregator.prometheus import Metrics
from fedone_sdk.aggregator.telemetry import Observers, Tracing
from fedone_sdk.backends import Answer, LLMBackend, ModelClient, Query
from fedone_sdk.errors import BackendUnavailable
from fedone_sdk.testing import ScriptedBackend
from tests.integration.caller import ADMIN, TOKEN, Server, served
from tests.runs import run_spec

EXAMPLES = [{"text": "a first text"}, {"text": "a second text"}]
SPEC = run_spec(budget={"queries": 100, "tokens": 100_000})

Figures = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Flaky(ScriptedBackend):
    """Fails the first time."""

    failed = False

    async def score(self, query: Query) -> Answer:
        if not self.failed:
            self.failed = True
            raise BackendUnavailable("busy")
        return await super().score(query)


async def work(server: Server, **headers: str) -> str:
    """Enrols a device, which does a round with one failed call of the gateway."""
    credential = await server.credential()
    work = await server.claim(credential)
    score = {"assignment_id": work["assignment_id"], "examples": EXAMPLES}
    code = await server.refused("POST", "/v1/score", score, token=credential)
    assert code == "backend_unavailable"
    await server.ok("POST", "/v1/score", score, token=credential, headers=headers)
    assert (await server.update(credential, work))[0] == 200
    return credential


async def exposition(server: Server) -> str:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    async with server.session.get(f"{server.url}/metrics", headers=headers) as response:
        assert response.status == 200
        return await response.text()


async def figures_of(server: Server) -> Figures:
    return figures_in(await exposition(server))


def figures_in(text: str) -> Figures:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def serving(
    observers: Observers, backend: LLMBackend | None = None
) -> AbstractAsyncContextManager[Server]:
    backend = ModelClient(backend or Flaky(), watch=observers.model_request)
    return served(SPEC, backend=backend, observers=observers)


class TestMetrics:
    async def test_the_figures_of_a_round(self) -> None:
        async with serving(Observers(metrics=Metrics())) as service:
            await work(service)
            found = await figures_of(service)

        def figure(name: str, **labels: str) -> float:
            return found[f"fedone_{name}", tuple(sorted(labels.items()))]

        assert figure("clients_enrolled") == 1
        assert figure("clients_waiting") <= 1
        assert figure("replicas") == 1
        assert figure("leader") == 1
        assert figure("runs", status="running") == 1
        assert figure("run_rounds_total", run="run") == 1
        assert figure("run_spent_total", run="run", unit="queries") == 4
        assert figure("run_left", run="run", unit="queries") == 96
        assert figure("run_leased", run="run", unit="queries") == 0
        # What a cap is left of, is spent and leased in the same unit.
        spent, left = (
            figure(f"run_{name}", run="run", unit="tokens") for name in ("spent_total", "left")
        )
        assert spent > 0
        assert spent == sum(
            figure("run_spent_total", run="run", unit=unit)
            for unit in ("prompt_tokens", "completion_tokens")
        )
        assert spent + figure("run_leased", run="run", unit="tokens") + left == 100_000
        assert figure("run_mean_loss", run="run") == 0.5
        assert figure("run_label_values_total", run="run") == 16
        assert figure("claim_wait_seconds_count", outcome="assigned") == 1
        assert figure("updates_total", outcome="accepted") == 1
        assert figure("http_problems_total", code="backend_unavailable") == 1
        assert figure("llm_request_duration_seconds_count", outcome="unavailable") >= 1
        assert figure("llm_request_duration_seconds_count", outcome="ok") >= 3
        assert figure("store_commit_duration_seconds_count", outcome="ok") >= 4
        scored = {"method": "POST", "route": "/v1/score"}
        assert figure("http_request_duration_seconds_count", status="200", **scored) == 1

    @pytest.mark.parametrize(
        ("status", "count"), [("413", 1), ("451", 1), ("500", 0), ("4\u0661\u0663", 0)]
    )
    async def test_what_proxies_refuse_is_counted(self, status: str, count: int) -> None:
        """The text is that of both clients (`tests/integration/test_edge_troubles.py`)."""
        reason = f"/v1/score: answered {status}, but the answer is not from an aggregator"
        async with serving(Observers(metrics=Metrics())) as service:
            credential = await work(service)
            path = f"/v1/assignments/{(await service.claim(credential))['assignment_id']}/decline"
            await service.ok("POST", path, {"reason": reason}, token=credential)
            labels = (("code", f"proxy_{status}"),)
            figures = await figures_of(service)
        assert figures.get(("fedone_http_problems_total", labels), 0) == count

    async def test_requests_in_progress_are_those_that_keep_a_replica_busy(self) -> None:
        """One that waits for the model counts, one that waits for work does not."""
        asked, answer = asyncio.Event(), asyncio.Event()

        class Slow(ScriptedBackend):
            async def score(self, query: Query) -> Answer:
                asked.set()
                await answer.wait()
                return await super().score(query)

        async with serving(Observers(metrics=Metrics()), backend=Slow()) as service:
            credentials = [await service.credential() for _ in range(2)]
            claims = [asyncio.create_task(service.claim(each, wait_s=20)) for each in credentials]
            done, waiting = await asyncio.wait(claims, return_when=asyncio.FIRST_COMPLETED)
            (first,) = done
            score = {"assignment_id": first.result()["assignment_id"], "examples": EXAMPLES}
            credential = credentials[claims.index(first)]
            scored = asyncio.create_task(service.call("POST", "/v1/score", score, token=credential))
            await asked.wait()
            found = await figures_of(service)
            assert found["fedone_long_polls", ()] == len(waiting) == 1
            # The score, and the request for the figures.
            assert found["fedone_requests_in_progress", ()] == 2
            answer.set()
            assert (await scored)[0] == 200
            assert (await figures_of(service))["fedone_requests_in_progress", ()] == 1
            (other,) = waiting
            other.cancel()
            await asyncio.wait(waiting)

    async def test_labels_are_bounded(self) -> None:
        """No request of any caller creates a new series."""
        async with serving(Observers(metrics=Metrics())) as service:
            await service.call("GET", "/v1/nothing", token=ADMIN)
            before = set(await figures_of(service))
            for number in range(20):
                await service.call("GET", f"/{number}", token=ADMIN)
                async with service.session.request(f"M{number}", f"{service.url}/{number}"):
                    pass
                await service.call("GET", f"/v1/nothing/{number}")
            after = await figures_of(service)
            credential = await work(service)
            rest = await figures_of(service)
        new = {key for key in set(after) - before if "/metrics" not in str(key)}
        assert new == set()
        assert credential not in str(rest)
        assert "client-" not in str(rest)

    async def test_metrics_require_a_token_on_the_main_port(self) -> None:
        async with serving(Observers(metrics=Metrics())) as service:
            assert (await service.call("GET", "/metrics"))[0] == 401
            assert (await service.call("GET", "/metrics", token=TOKEN))[0] == 401
            url = await service.aggregator.listen_metrics()
            async with service.session.get(f"{url}/metrics") as response:
                assert response.headers["Content-Type"].startswith("text/plain; version=")
                assert ("fedone_runs", (("status", "running"),)) in figures_in(
                    await response.text()
                )
            async with service.session.get(f"{url}/v1/runs") as response:
                assert response.status == 404


class TestTracing:
    async def test_spans(self) -> None:
        """A caller's trace continues through the gateway's task to the model and the store."""
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        async with serving(Observers(tracing=Tracing(provider))) as service:
            await work(service, traceparent=f"00-{trace}-{parent}-01")
        spans = exporter.get_finished_spans()
        asked = [span for span in spans if span.name == "POST /v1/score"]
        assert [attribute(span, "http.response.status_code") for span in asked] == [503, 200]
        failed, answered = asked
        assert not failed.status.is_ok
        assert attribute(failed, "error.type") == "backend_unavailable"
        assert format(answered.context.trace_id, "032x") == trace
        assert answered.parent is not None
        assert format(answered.parent.span_id, "016x") == parent
        assert attribute(answered, "fedone.run_id") == "run"
        assert attribute(answered, "fedone.round") == 0
        assert str(attribute(answered, "fedone.client_id")).startswith("client-")
        inside = [
            span for span in spans if span.parent and span.parent.span_id == answered_id(answered)
        ]
        names = {span.name for span in inside}
        assert names == {"model request", "store commit"}
        for span in inside:
            assert attribute(span, "fedone.run_id") == "run"
        model = [span for span in inside if span.name == "model request"]
        assert {attribute(span, "fedone.round") for span in model} == {0}
        assert {attribute(span, "fedone.model") for span in model} == {"scripted"}
        text = "".join(span.to_json() for span in spans)
        assert "busy" not in text  # what errors say stays here
        assert TOKEN not in text


def attribute(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {}).get(name)


def answered_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


async def test_log_lines() -> None:
    """Each line has its request, run, round and client, and never a secret."""
    lines: list[dict[str, Any]] = []

    def keep(_: Any, __: str, event: dict[str, Any]) -> str:
        lines.append(event)
        raise structlog.DropEvent

    structlog.configure(processors=[structlog.contextvars.merge_contextvars, keep])
    try:
        async with serving(Observers(request_level="info")) as service:
            credential = await work(service, **{"X-Request-ID": "my-request"})
            await service.call("GET", "/v1/nothing")
    finally:
        structlog.reset_defaults()
    requests = [line for line in lines if line["event"] == "request"]
    mine = next(line for line in requests if line["request_id"] == "my-request")
    assert mine["client_id"].startswith("client-")
    assert (mine["run_id"], mine["round"]) == ("run", 0)
    assert (mine["method"], mine["path"], mine["status"]) == ("POST", "/v1/score", 200)
    assert mine["wall_s"] >= 0
    nothing = requests[-1]
    assert (nothing["status"], nothing["code"]) == (404, "not_found")
    assert "client_id" not in nothing  # the connection's last request is forgotten
    assert "run_id" not in nothing
    assert len({line["request_id"] for line in requests}) == len(requests)
    for secret in (credential, TOKEN, ADMIN):
        assert secret not in str(lines)


async def test_streams_end_when_the_service_takes_leave() -> None:
    async with serving(Observers()) as service, asyncio.timeout(10):
        headers = {"Authorization": f"Bearer {ADMIN}"}
        url = f"{service.url}/v1/runs/run/events"
        async with service.session.get(url, headers=headers) as response:
            assert "X-Request-ID" in response.headers
            reading = asyncio.create_task(response.text())
            while not service.aggregator.service.listeners:
                await asyncio.sleep(0.001)
            service.aggregator.drain()
            assert "event: end" not in await reading
        assert (await service.call("GET", "/readyz"))[0] == 503
        assert (await service.call("GET", "/healthz"))[0] == 200
