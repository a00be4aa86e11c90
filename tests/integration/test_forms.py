"""Arrays over HTTP, as files of tensors: negotiation, and equality of both forms."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tenacity
from yarl import URL

import fedone_sdk.aggregator.http.requests as http_module
from fedone_sdk.aggregator import Aggregator, ServedRun
from fedone_sdk.aggregator.routes import MAX_BODY_BYTES
from fedone_sdk.budget import Usage
from fedone_sdk.client import HttpTransport
from fedone_sdk.errors import MessageError, TransportError
from fedone_sdk.messages import (
    ASSIGNMENT,
    JSON,
    MAX_ELEMENTS,
    TENSORS,
    AlphaAssignment,
    AlphaUpdate,
    Array,
    Body,
    Claim,
    Enrol,
    Message,
    Scored,
    decode,
    encode,
)
from fedone_sdk.spec import RunSpec
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.edge import edge_client
from tests.integration.caller import Caller
from tests.runs import PROMPT, TOKEN, run_spec
from tests.wire_vectors import vectors

WORDS = Vocabulary(candidates=tuple(f" word{n}" for n in range(200)))
DATA: list[dict[str, Any]] = [{"text": f"text {n}", "label": n % 2} for n in range(6)]
BAD = vectors("bad_tensors.json")


def spec_of(
    exchange: str = "alpha", *, rounds: int = 2, length: int = 20, **method: Any
) -> RunSpec:
    return run_spec(
        prompt={**PROMPT, "length": length},
        method={"batch_size": 4, **method},
        participation={"exchange": exchange},
        rounds=rounds,
        seed=3,
    )


@dataclass(frozen=True, slots=True)
class Sent:
    """A request and its answer, as bytes.

    Attributes:
        call: The last part of the path.
        accept: What the client says that it takes.
        form: Content type of the request; empty without a body.
        content: Its body.
        status: Of the answer.
        answer_form: Its content type.
        answer: Its body.
    """

    call: str
    accept: str
    form: str
    content: bytes
    status: int
    answer_form: str
    answer: bytes


class Recorded(HttpTransport):
    """Keeps what goes over the wire.

    Args:
        server: Base URL.
        loses: Calls whose next answer is lost.
    """

    def __init__(self, server: str, *loses: str, **options: Any) -> None:
        super().__init__(server, **options)
        self.sent: list[Sent] = []
        self.loses = list(loses)

    async def _send(
        self, method: str, url: URL, content: bytes, headers: Mapping[str, str], *limits: Any
    ) -> tuple[int, Mapping[str, str], bytes]:
        status, answered, body = await super()._send(method, url, content, headers, *limits)
        call = url.path.rpartition("/")[2]
        form, answer_form = headers.get("Content-Type", ""), answered.get("Content-Type", "")
        sent = Sent(call, headers["Accept"], form, content, status, answer_form, body)
        self.sent.append(sent)
        if call in self.loses:
            self.loses.remove(call)
            raise TransportError("the answer is lost")
        return status, answered, body

    def calls(self, name: str) -> list[Sent]:
        return [sent for sent in self.sent if sent.call == name]


@asynccontextmanager
async def serving(
    spec: RunSpec | None = None, words: Vocabulary = WORDS, **options: Any
) -> AsyncIterator[Aggregator]:
    async with Aggregator(
        backend=ScriptedBackend(), enrolment_tokens=[TOKEN], **options
    ) as aggregator:
        await aggregator.add_run(spec or spec_of(), words)
        yield aggregator


def run_of(aggregator: Aggregator) -> ServedRun:
    return aggregator.service.runs["run"]


async def completed(
    aggregator: Aggregator, transport: Callable[[str], HttpTransport], **options: Any
) -> Any:
    """A device works on the run to its end."""
    url = await aggregator.listen()
    used = transport(url)
    async with asyncio.timeout(60):
        async with edge_client(url, token=TOKEN, data=DATA, transport=used, **options) as client:
            await client.run_forever()
    assert run_of(aggregator).state.status == "completed"
    return used


class TestClient:
    async def test_alpha_travels_as_tensors(self) -> None:
        async with serving() as aggregator:
            wire = await completed(aggregator, Recorded)
            result = run_of(aggregator).result()
        claims = [sent for sent in wire.calls("claim") if sent.status == 200]
        assert len(claims) == len(wire.calls("update")) == 2
        for sent in claims:
            assert sent.answer_form == TENSORS
            assert 16_000 < len(sent.answer) < 17_000
        for sent in wire.calls("update"):
            assert (sent.form, sent.status) == (TENSORS, 200)
            assert 16_000 < len(sent.content) < 17_000
        # What is reported is what was sent, in whatever form.
        federated = [sent for sent in wire.sent if sent.call != "score"]
        shown = result.communication
        assert shown.download_bytes == sum(len(sent.answer) for sent in federated)
        assert shown.upload_bytes == sum(len(sent.content) for sent in federated)

    async def test_small_arrays_stay_json(self) -> None:
        few = Vocabulary(candidates=(" a", " b", " c"))
        async with serving(spec_of(length=2, rounds=1), few) as aggregator:
            wire = await completed(aggregator, Recorded)
        assert {sent.form for sent in wire.calls("update")} == {JSON}
        assert {sent.answer_form.partition(";")[0] for sent in wire.calls("claim")} <= {
            JSON,
            "application/problem+json",
        }

    async def test_scores_come_as_tensors_where_that_is_shorter(self) -> None:
        data = [{"text": f"text {n}", "label": n % 2} for n in range(60)]
        document = spec_of("losses", rounds=1).model_dump(mode="json")
        document["method"] |= {"batch_size": 50, "num_samples": 10}
        async with serving(RunSpec.model_validate(document)) as aggregator:
            url = await aggregator.listen()
            wire = Recorded(url)
            async with asyncio.timeout(60):
                async with edge_client(url, token=TOKEN, data=data, transport=wire) as client:
                    await client.run_forever()
            shown = run_of(aggregator).result().gateway
        forms = {sent.answer_form for sent in wire.calls("score")}
        assert forms == {TENSORS}
        assert shown.download_bytes == sum(len(sent.answer) for sent in wire.calls("score"))

    @pytest.mark.parametrize("answer", [b"", b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 40])
    async def test_an_answer_that_is_no_file(
        self, answer: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with serving() as aggregator:
            url = await aggregator.listen()
            wire = HttpTransport(url)
            enrolled = await wire.enrol(TOKEN, Enrol())
            monkeypatch.setattr(http_module, "encode", lambda *given: Body(TENSORS, answer))
            with pytest.raises(MessageError, match="malformed: tensors"):
                await wire.claim(enrolled.credential, Claim(num_examples=6, wait_s=0))
            await wire.aclose()


class TestOutbox:
    async def test_the_same_bytes_after_a_restart(self, tmp_path: Path) -> None:
        async with serving(spec_of(rounds=1)) as aggregator:
            url = await aggregator.listen()
            sent: list[Sent] = []
            for loses in (("update",), ("update",), ()):
                wire = Recorded(url, *loses)
                client = edge_client(
                    url, token=TOKEN, data=DATA, transport=wire, state_dir=tmp_path
                )
                async with client:
                    if loses:
                        client._session._retrying.stop = tenacity.stop_after_attempt(1)
                        assert (await client.run_once()).outcome == "offline"
                    else:
                        assert (await client.run_once()).outcome == "ended"
                sent += wire.calls("update")
            assert run_of(aggregator).state.status == "completed"
        assert len(sent) == 3
        assert {(one.form, one.content, one.status) for one in sent} == {
            (TENSORS, sent[0].content, 200)
        }
        assert len({one.answer for one in sent}) == 1


async def claimed(wire: HttpTransport) -> tuple[AlphaAssignment, str]:
    enrolled = await wire.enrol(TOKEN, Enrol())
    work = await wire.claim(enrolled.credential, Claim(num_examples=6, wait_s=0))
    assert isinstance(work, AlphaAssignment)
    return work, enrolled.credential


def update_for(work: AlphaAssignment, **changes: Any) -> AlphaUpdate:
    given: dict[str, Any] = {
        "num_examples": 6,
        "scored": Scored(scored=4),
        "usage": Usage(),
        "model": "scripted",
        "alpha": work.alpha,
        "mean_loss": 0.5,
        **changes,
    }
    return AlphaUpdate(**given)


@dataclass(slots=True)
class Server(Caller):
    """A real aggregator on loopback that has given out work, and a way to send it anything."""

    aggregator: Aggregator
    url: str
    session: aiohttp.ClientSession
    work: AlphaAssignment
    credential: str

    @property
    def path(self) -> str:
        return f"/v1/assignments/{self.work.assignment_id}/update"

    async def send(self, body: Body, path: str | None = None) -> tuple[int, Any]:
        """Status and JSON of the answer."""
        status, document, _ = await self.call(
            "POST",
            path or self.path,
            body.content,
            token=self.credential,
            headers={"Content-Type": body.content_type},
        )
        return status, document

    async def claim(self, accept: str | None) -> tuple[aiohttp.ClientResponse, bytes]:
        """The open work once more."""
        headers = {} if accept is None else {"Accept": accept}
        async with self.session.post(
            f"{self.url}/v1/assignments/claim",
            json={"num_examples": 6, "wait_s": 0},
            headers={"Authorization": f"Bearer {self.credential}", **headers},
        ) as response:
            return response, await response.read()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as aggregator:
        url = await aggregator.listen()
        wire = HttpTransport(url)
        work, credential = await claimed(wire)
        await wire.aclose()
        async with aiohttp.ClientSession() as session:
            yield Server(aggregator, url, session, work, credential)


class TestServer:
    @pytest.mark.parametrize("accept", [None, "*/*", JSON, f"{TENSORS};q=0"])
    async def test_json_is_the_default(self, server: Server, accept: str | None) -> None:
        response, content = await server.claim(accept)
        assert response.content_type == JSON
        assert same_work(ASSIGNMENT.validate_json(content), server.work)

    async def test_tensors_on_request(self, server: Server) -> None:
        response, content = await server.claim(f"{TENSORS}, {JSON}")
        assert response.content_type == TENSORS
        assert same_work(decode(ASSIGNMENT.validate_json, content, TENSORS), server.work)

    async def test_a_renewal_carries_no_arrays(self, server: Server) -> None:
        """An older client accepts tensors, and ignores the answer."""
        async with server.session.post(
            f"{server.url}/v1/assignments/{server.work.assignment_id}/renew",
            headers={"Authorization": f"Bearer {server.credential}", "Accept": TENSORS},
        ) as response:
            assert await response.json() == {"deadline_s": server.work.deadline_s}

    @pytest.mark.parametrize("accept", [TENSORS, JSON])
    async def test_the_same_body_gets_the_same_receipt(self, server: Server, accept: str) -> None:
        body, other = encode(update_for(server.work), accept), encode(
            update_for(server.work, mean_loss=0.25), accept
        )  # fmt: skip
        assert body.content_type == accept
        status, receipt = await server.send(body)
        assert (status, receipt["body_sha256"]) == (200, hashlib.sha256(body.content).hexdigest())
        assert await server.send(body) == (200, receipt)
        status, refusal = await server.send(other)
        assert (status, refusal["code"]) == (409, "update_conflict")
        # Bytes are what counts, not what they mean.
        plain = encode(update_for(server.work), JSON if accept == TENSORS else TENSORS)
        status, refusal = await server.send(plain)
        assert (status, refusal["code"]) == (409, "update_conflict")
        assert await server.send(body) == (200, receipt)

    async def test_bad_files_change_nothing(self, server: Server) -> None:
        before = run_of(server.aggregator).state
        for vector in BAD:
            content = base64.b64decode(vector["file"])
            status, document = await server.send(Body(TENSORS, content))
            assert (status, document["code"]) == (422, "invalid_message"), vector["name"]
            assert vector["detail"] in document["detail"]
            assert len(document["detail"]) < 500  # it does not echo what was sent
            assert run_of(server.aggregator).state is before
        assert (await server.send(encode(update_for(server.work), TENSORS)))[0] == 200

    async def test_a_file_over_the_limit(self, server: Server) -> None:
        before = run_of(server.aggregator).state
        good = encode(update_for(server.work), TENSORS).content
        body = Body(TENSORS, good + bytes(MAX_BODY_BYTES))
        # The connection may end before all of it was sent.
        try:
            status, document = await server.send(body)
            assert (status, document["code"]) == (413, "body_too_large")
        except aiohttp.ClientConnectionError:
            pass
        assert run_of(server.aggregator).state is before

    async def test_the_largest_array_comes_through(self, server: Server) -> None:
        """Refused for its shape alone, which is not the run's."""
        alpha = Array.from_bytes(b"\0\0\x80?" * MAX_ELEMENTS, (2048, 2048), "float32")
        status, document = await server.send(encode(update_for(server.work, alpha=alpha), TENSORS))
        assert (status, document["code"]) == (422, "invalid_message")
        assert "alpha" in document["detail"]

    @pytest.mark.parametrize("path", ["/v1/assignments/claim", "/v1/clients", "decline"])
    async def test_only_where_there_are_arrays(self, server: Server, path: str) -> None:
        path = server.path.replace("update", path) if path == "decline" else path
        token = TOKEN if path == "/v1/clients" else server.credential
        headers = {"Content-Type": TENSORS}
        body = encode(update_for(server.work), TENSORS).content
        code = await server.refused("POST", path, body, token=token, headers=headers)
        assert code == "not_json"

    async def test_what_is_neither_form(self, server: Server) -> None:
        for form in ("application/octet-stream", "text/plain", f"{TENSORS}+json"):
            status, document = await server.send(Body(form, b"{}"))
            assert (status, document["code"]) == (415, "not_json")
            assert document["detail"].endswith(f"taken is {JSON} or {TENSORS}")

    async def test_a_text_of_a_file_is_read_as_strictly_as_json(self, server: Server) -> None:
        text = update_for(server.work).model_dump_json()
        for broken in (
            text[:-1] + ',"mean_loss":0.5}',
            text.replace("0.5", "NaN"),
            text[:-1] + ',"x":' + "[" * 20_000 + "]" * 20_000 + "}",
        ):
            status, document = await server.send(Body(JSON, broken.encode()))
            assert status == 422
            file = _with_text(encode(update_for(server.work), TENSORS).content, broken)
            status, refusal = await server.send(Body(TENSORS, file))
            assert (status, refusal["detail"]) == (422, document["detail"])


def same_work(one: Message, other: AlphaAssignment) -> bool:
    """But for the time that is left."""
    return one.model_copy(update={"deadline_s": other.deadline_s}) == other


def _with_text(file: bytes, text: str) -> bytes:
    length = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + length])
    header["__metadata__"]["message"] = text
    written = json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + file[8 + length :]
