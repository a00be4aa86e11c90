"""The network of a device: proxies, authorities, wrong clocks, hostile answers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import ssl
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs
from yarl import URL

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator import Aggregator
from fedone_sdk.aggregator.http.application import listening
from fedone_sdk.client import ClientEvent, HttpTransport, Network
from fedone_sdk.client.state import DeviceState
from fedone_sdk.client.transport import _retry_after_s
from fedone_sdk.errors import MessageError, ProblemError, SpecError, TransportError
from fedone_sdk.messages import Claim, Enrol, Enrolled, Problem
from fedone_sdk.spec import RunSpec
from fedone_sdk.testing import ScriptedBackend
from tests.certificates import issue
from tests.chaos.proxy import TcpServer
from tests.edge import edge_client
from tests.runs import TOKEN, WORDS, run_spec

SECRET = "pr0xy-passw0rd"
DATA: list[dict[str, Any]] = [{"text": f"text {n}", "label": n % 2} for n in range(6)]


def spec_of(rounds: int = 2) -> RunSpec:
    return run_spec(rounds=rounds, method={"batch_size": 5})


class Authority:
    """A private authority, as a company has one."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._issued = folder, issue("ca")
        self.file, _ = self._issued.write(folder, "ca")

    def issue(self, name: str) -> tuple[Path, Path]:
        """A certificate for this machine, and its key."""
        return issue(name, self._issued).write(self._folder, name)


class HttpProxy(TcpServer):
    """A proxy with a password: it tunnels (CONNECT), and forwards plain requests."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.refused = 0

    @property
    def url(self) -> str:
        return f"http://user:{SECRET}@127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError), contextlib.closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            line, *fields = head.split("\r\n")
            method, target, _ = line.split(" ")
            wanted = base64.b64encode(f"user:{SECRET}".encode()).decode()
            if f"Proxy-Authorization: Basic {wanted}" not in fields:
                self.refused += 1
                writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\n")
                writer.write(b"Content-Length: 0\r\nConnection: close\r\n\r\n")
                await writer.drain()
                return
            self.seen.append(method)
            url = URL(f"//{target}" if method == "CONNECT" else target)
            assert url.host is not None
            upstream, onwards = await asyncio.open_connection(url.host, url.port)
            with contextlib.closing(onwards):
                if method == "CONNECT":
                    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                else:
                    kept = [field for field in fields if not field.startswith("Proxy-")]
                    onwards.write(
                        "\r\n".join([f"{method} {url.raw_path} HTTP/1.1", *kept]).encode()
                    )
                await asyncio.gather(_pipe(reader, onwards), _pipe(upstream, writer))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def aggregator(
    tls: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[tuple[Aggregator, str]]:
    async with Aggregator(backend=ScriptedBackend(), enrolment_tokens=[TOKEN], **options) as served:
        await served.add_run(spec_of(), WORDS)
        yield served, await served.listen(ssl_context=tls)


def server_context(authority: Authority, *, clients: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.file)
    context.load_cert_chain(*authority.issue("server"))
    context.verify_mode = ssl.CERT_REQUIRED if clients else ssl.CERT_NONE
    return context


async def works(served: Aggregator, client: EdgeClient) -> None:
    async with asyncio.timeout(30), client:
        await client.run_forever()
    assert served.service.runs["run"].state.status == "completed"


class TestTls:
    async def test_a_private_authority(self, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        async with aggregator(server_context(authority)) as (served, url):
            async with EdgeClient(url, token=TOKEN, data=DATA) as client:
                assert (await client.run_once()).outcome == "offline"  # the system does not know it
            network = Network(ca_file=authority.file)
            await works(served, EdgeClient(url, token=TOKEN, data=DATA, network=network))

    @pytest.mark.parametrize(
        ("wrong", "events"),
        [
            ({"ca_file": "none.pem"}, "ca_file: none.pem cannot be used"),
            ({"ca_file": __file__}, "ca_file: .* cannot be used"),
            ({"cert_file": __file__}, "cert_file: .* cannot be used"),
            ({"key_file": "key.pem"}, "key_file: needs cert_file"),
            ({"proxy": "127.0.0.1:8080"}, "proxy: is not a proxy"),
            ({"proxy": "socks5://a:b@c:1"}, "proxy: is not a proxy"),
            ({"proxy": f"http://a:b@{'c' * 64}.x:1"}, "proxy: is not a proxy"),
        ],
    )
    def test_mistakes_are_one_line(self, wrong: dict[str, Any], events: str) -> None:
        with pytest.raises(SpecError, match=events) as excinfo:
            HttpTransport("https://fedone.example", network=Network(**wrong))
        assert "\n" not in str(excinfo.value)
        assert "a:b" not in str(excinfo.value)

    def test_a_context_stands_alone(self) -> None:
        context = ssl.create_default_context()
        assert Network(ssl_context=context).context() is context
        with pytest.raises(SpecError, match="combined with ca_file"):
            Network(ssl_context=context, ca_file="ca.pem").context()


class TestProxy:
    @pytest.mark.parametrize("secure", [True, False])
    @pytest.mark.parametrize("by", ["argument", "environment"])
    async def test_a_whole_run(
        self, tmp_path: Path, secure: bool, by: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        authority = Authority(tmp_path)
        context = server_context(authority) if secure else None
        async with HttpProxy() as proxy, aggregator(context) as (served, url):
            monkeypatch.setenv("NO_PROXY", "")
            monkeypatch.setenv("no_proxy", "")
            if by == "environment":
                monkeypatch.setenv("HTTPS_PROXY" if secure else "HTTP_PROXY", proxy.url)
            network = Network(
                proxy=proxy.url if by == "argument" else None,
                ca_file=authority.file if secure else None,
            )
            with capture_logs() as logs:
                client = EdgeClient(url, token=TOKEN, data=DATA, network=network)
                await works(served, client)
            # Connections stay open: only the first request of each is seen.
            assert set(proxy.seen) == ({"CONNECT"} if secure else {"POST"})
            assert proxy.refused == 0
            assert SECRET not in f"{logs}{network}{network!r}{client!r}"

    async def test_a_wrong_password_is_not_repeated(self, tmp_path: Path) -> None:
        events: list[ClientEvent] = []
        authority = Authority(tmp_path)
        async with HttpProxy() as proxy, aggregator(server_context(authority)) as (_, url):
            wrong = proxy.url.replace(SECRET, "wr0ng-passw0rd")
            network = Network(proxy=wrong, ca_file=authority.file)
            client = edge_client(
                url, token=TOKEN, data=DATA, network=network, on_event=events.append
            )
            with capture_logs() as logs:
                async with client:
                    client.stop()
                    assert (await client.run_once()).outcome == "offline"
            assert proxy.refused == 1
        assert "407" in str(events[-1].reason)
        assert "wr0ng" not in f"{events}{logs}{network!r}"

    def test_hosts_that_need_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
        monkeypatch.setenv("NO_PROXY", "inside.example")
        outside, inside = URL("https://outside.example"), URL("https://inside.example")
        assert Network().options(outside) == {"proxy": URL("http://proxy.example:3128")}
        assert Network().options(inside) == {}
        monkeypatch.delenv("HTTPS_PROXY")
        monkeypatch.setenv("ALL_PROXY", "http://all.example:3128")
        assert Network().options(outside) == {"proxy": URL("http://all.example:3128")}

    async def test_a_password_of_the_server_s_in_netrc(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has another owner: the credential is dropped, and nothing breaks."""
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login a password b\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        async with aggregator() as (served, url):
            await works(served, EdgeClient(url, token=TOKEN, data=DATA))


class TestIdentity:
    async def test_an_enrolment_whose_answer_is_lost(self, tmp_path: Path) -> None:
        """Asked again, also after a restart, it is the same device."""

        class Lossy(HttpTransport):
            async def enrol(self, token: str, message: Enrol) -> Enrolled:
                await super().enrol(token, message)
                raise asyncio.CancelledError

        async with aggregator() as (served, url):
            for _ in range(3):
                lossy = Lossy(url)
                client = edge_client(
                    url, token=TOKEN, data=DATA, state_dir=tmp_path, transport=lossy
                )
                async with client:
                    with pytest.raises(asyncio.CancelledError):
                        await client.run_once()
            spelt = f" {url.upper()}/"  # another spelling is the same server
            await works(served, EdgeClient(spelt, token=TOKEN, data=DATA, state_dir=tmp_path))
            assert len(await served.service.store.clients()) == 1

    async def test_another_credential(self, tmp_path: Path) -> None:
        async with aggregator() as (served, url):
            client = EdgeClient(url, token=TOKEN, data=DATA, state_dir=tmp_path)
            async with client:
                assert (await client.run_once()).outcome == "worked"
                before = client._session.credential
                await client.rotate_credential()
                assert client._session.credential != before
                assert DeviceState(tmp_path, url).identity.credential == client._session.credential
                await client.run_forever()
            assert served.service.runs["run"].state.status == "completed"
            transport = HttpTransport(url)
            with pytest.raises(ProblemError, match="unauthorized"):
                await transport.claim(before, Claim(num_examples=1))
            await transport.aclose()


@asynccontextmanager
async def answering(
    status: int, body: bytes, headers: dict[str, str] | None = None, *, times: int = 1
) -> AsyncIterator[str]:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        with contextlib.suppress(OSError):
            for _ in range(times):
                await response.write(body)
        return response

    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{tail:.*}", handler)
    async with listening(app) as url:
        yield url


class TestHostileAnswers:
    @pytest.mark.parametrize(
        ("status", "body", "headers"),
        [
            (200, b"<html>Welcome to our hotel</html>", {"Content-Type": "text/html"}),
            (302, b"", {"Location": "http://login.example"}),
            (403, b"blocked by your provider", {}), (200, b"[" * 1_000_000, {}),
            (200, b'{"client_id": "a", "credential": "b", "more": 1}', {}),
            (502, b"bad gateway", {}), (200, b"{" + b" " * 2_000_000, {}),
        ],
        ids=["login page", "redirect", "block page", "deep", "unknown key", "bad gateway", "large"],
    )  # fmt: skip
    async def test_a_device_waits(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        """A hotel's login page is no reason to give up: the device is offline."""
        events: list[ClientEvent] = []
        async with answering(status, body, headers) as url:
            client = edge_client(url, token=TOKEN, data=DATA, on_event=events.append)
            async with client:
                client.stop()  # one attempt
                assert (await client.run_once()).outcome == "offline"
        assert [event.kind for event in events] == ["offline"]

    async def test_a_server_that_wants_a_newer_client(self) -> None:
        """Waiting does not help: the app gets an error."""
        body = Problem.of(ProblemError("upgrade_required", "speak version 9")).model_dump_json()
        async with (
            answering(426, body.encode()) as url,
            EdgeClient(url, token=TOKEN, data=DATA) as client,
        ):
            with pytest.raises(ProblemError, match="speak version 9"):
                await client.run_forever()

    @pytest.mark.parametrize("packed", [False, True])
    async def test_an_answer_without_end_is_cut_off(self, packed: bool) -> None:
        """64 MiB, or 64 MiB packed into 64 KiB: the device holds neither."""
        body, times, headers = b" " * 65536, 1024, {}
        if packed:
            body, times = gzip.compress(body * times), 1
            headers = {"Content-Encoding": "gzip"}
        async with answering(200, body, headers, times=times) as url:
            transport = HttpTransport(url)
            tracemalloc.start()
            try:
                with pytest.raises((MessageError, TransportError)):
                    await transport.task("credential", "run")
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
                await transport.aclose()
        assert peak < 8 * 1024 * 1024


class TestRetryAfter:
    @pytest.mark.parametrize(
        ("date", "after", "seconds"),
        [(None, "7", 7.0), (None, "86400", 3600.0), (None, "-1", 0.0), (None, "nan", 1.0),
         (None, "soon", 1.0), (None, None, 1.0), (None, "Tue, 01 Jan 2030 00:30:00 GMT", 1.0),
         # By the server's clock, however wrong the device's is.
         ("Tue, 01 Jan 2030 00:00:00 GMT", "Tue, 01 Jan 2030 00:30:00 GMT", 1800.0)],
    )  # fmt: skip
    def test_forms(self, date: str | None, after: str | None, seconds: float) -> None:
        sent = {"Date": date, "Retry-After": after}
        assert _retry_after_s({k: v for k, v in sent.items() if v is not None}) == seconds
