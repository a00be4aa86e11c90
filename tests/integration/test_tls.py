"""https with real certificates and connections: access, and reloaded certificates."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog
from aiohttp import web
from cryptography import x509
from pydantic import ValidationError

from fedone_sdk.aggregator import Aggregator
from fedone_sdk.aggregator.http.application import listening
from fedone_sdk.aggregator.http.guards import ServerTls, TlsConfig
from fedone_sdk.aggregator.http.requests import problems
from fedone_sdk.client import HttpTransport
from fedone_sdk.client.transport import Network
from fedone_sdk.errors import ProblemError, SpecError, TransportError
from fedone_sdk.messages import Enrol
from tests.certificates import Issued, issue


@dataclass
class Setting:
    """Authorities and certificates in a folder, and a server that has them."""

    folder: Path

    def __post_init__(self) -> None:
        self.authority = issue("authority")
        self.authority.write(self.folder, "authority")
        self.devices = issue("devices")
        self.devices.write(self.folder, "devices")
        issue("localhost", self.authority).write(self.folder, "server")

    def tls(self, **changes: Any) -> ServerTls:
        config = {"certificate": "server.pem", "key": "server.key", **changes}
        return ServerTls(TlsConfig.model_validate(config), self.folder)

    def trust(self, device: Issued | None = None) -> ssl.SSLContext:
        """What a device connects with."""
        context = ssl.create_default_context(cafile=self.folder / "authority.pem")
        if device is not None:
            context.load_cert_chain(*device.write(self.folder, "device"))
        return context

    def replace(self, issued: Issued, name: str = "server") -> None:
        """Writes new files, with a time that no clock is too coarse to see."""
        for file in issued.write(self.folder, name):
            os.utime(file, ns=(later := file.stat().st_mtime_ns + 1_000_000_000, later))


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


@asynccontextmanager
async def serving(tls: ServerTls) -> AsyncIterator[str]:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application(middlewares=[problems])
    app.router.add_get("/", hello)
    async with listening(app, ssl_context=tls.context) as url:
        yield url.replace("127.0.0.1", "localhost")


async def ask(url: str, trust: ssl.SSLContext) -> str:
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(family=2)) as session,
        session.get(url, ssl=trust) as response,
    ):
        return await response.text()


async def serial(url: str, trust: ssl.SSLContext) -> int:
    """The serial number of the certificate that a new connection is shown."""
    port = int(url.rpartition(":")[2])
    _, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=trust, server_hostname="localhost"
    )
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return x509.load_der_x509_certificate(shown).serial_number


async def test_nothing_older_than_tls_1_2_is_accepted(setting: Setting) -> None:
    tls = setting.tls()
    assert tls.context.minimum_version == ssl.TLSVersion.TLSv1_2
    async with serving(tls) as url:
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            trust = setting.trust()
            trust.minimum_version = trust.maximum_version = version
            assert await ask(url, trust) == "hello"


class TestDevicesWithCertificates:
    @pytest.mark.parametrize("required", [True, False])
    async def test_a_certificate_of_another_authority_is_refused(
        self, setting: Setting, required: bool
    ) -> None:
        tls = setting.tls(client_ca="devices.pem", require_client_certificate=required)
        async with serving(tls) as url:
            for stranger in (issue("stranger"), issue("device", setting.authority)):
                with pytest.raises(aiohttp.ClientError):
                    await ask(url, setting.trust(stranger))

    async def test_it_may_be_left_to_the_device(self, setting: Setting) -> None:
        tls = setting.tls(client_ca="devices.pem", require_client_certificate=False)
        async with serving(tls) as url:
            assert await ask(url, setting.trust()) == "hello"
            trust = setting.trust(issue("device", setting.devices))
            assert await ask(url, trust) == "hello"

    async def test_a_removed_authority_admits_no_client(self, setting: Setting) -> None:
        tls = setting.tls(client_ca="devices.pem")
        before = setting.trust(issue("device", setting.devices))
        async with serving(tls) as url:
            assert await ask(url, before) == "hello"
            new = issue("new devices")
            setting.replace(new, "devices")
            assert tls.reload()
            # The same context: a session taken up again would show no certificate.
            with pytest.raises(aiohttp.ClientError):
                await ask(url, before)
            assert await ask(url, setting.trust(issue("device", new))) == "hello"

    async def test_no_session_outlives_an_authority(self, setting: Setting) -> None:
        trust = setting.trust(issue("device", setting.devices))
        async with serving(setting.tls(client_ca="devices.pem")) as url:
            _, session = await asyncio.to_thread(greet, url, trust, None)
            assert not session.has_ticket
            reused, _ = await asyncio.to_thread(greet, url, trust, session)
            assert not reused
            trust.maximum_version = ssl.TLSVersion.TLSv1_2  # It has sessions of another kind.
            with pytest.raises(ssl.SSLError):
                await asyncio.to_thread(greet, url, trust, None)

    async def test_a_device_of_ours_gets_through(self, setting: Setting) -> None:
        certificate, key = issue("device", setting.devices).write(setting.folder, "device")
        known = Network(
            ca_file=setting.folder / "authority.pem", cert_file=certificate, key_file=key
        )
        unknown = Network(ca_file=setting.folder / "authority.pem")
        tls = setting.tls(client_ca="devices.pem")
        async with Aggregator(enrolment_tokens=["fleet-secret"]) as aggregator:
            url = await aggregator.listen(ssl_context=tls.context)
            url = url.replace("127.0.0.1", "localhost")
            transport = HttpTransport(url, network=known)
            # The certificate comes on top of the token, never instead of it.
            with pytest.raises(ProblemError, match="unauthorized"):
                await transport.enrol("wrong", Enrol())
            await transport.enrol("fleet-secret", Enrol())
            await transport.aclose()
            transport = HttpTransport(url, network=unknown)
            with pytest.raises(TransportError):
                await transport.enrol("fleet-secret", Enrol())
            await transport.aclose()


def greet(
    url: str, trust: ssl.SSLContext, session: ssl.SSLSession | None
) -> tuple[bool | None, ssl.SSLSession]:
    """Send a request over a connection that resumes an earlier session, if there is one."""
    port = int(url.rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        trust.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        return connection.session_reused, connection.session


class TestChangedFiles:
    async def test_new_connections_see_the_new_certificate(self, setting: Setting) -> None:
        tls = setting.tls()
        async with (
            serving(tls) as url,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(family=2)) as session,
        ):
            trust = setting.trust()
            first = await serial(url, trust)
            async with session.get(url, ssl=trust) as response:
                assert await response.text() == "hello"
            assert not tls.reload()
            setting.replace(second := issue("localhost", setting.authority))
            assert tls.reload()
            assert await serial(url, trust) == second.certificate.serial_number != first
            assert not tls.reload()
            # A connection that is open stays open.
            async with session.get(url, ssl=trust) as response:
                assert await response.text() == "hello"

    async def test_files_that_do_not_fit_are_passed_over(self, setting: Setting) -> None:
        tls = setting.tls()
        async with serving(tls) as url:
            first = await serial(url, setting.trust())
            second = issue("localhost", setting.authority)
            key = (setting.folder / "server.key").read_bytes()
            setting.replace(second)
            good = (setting.folder / "server.key").read_bytes()
            for half in (key, b"", b"no key"):
                (setting.folder / "server.key").write_bytes(half)
                with structlog.testing.capture_logs() as logs:
                    assert not tls.reload()
                assert "cannot be used" in logs[0]["event"]
                assert await serial(url, setting.trust()) == first
            (setting.folder / "server.key").unlink()
            assert not tls.reload()
            (setting.folder / "server.key").write_bytes(good)
            assert tls.reload()
            assert await serial(url, setting.trust()) == second.certificate.serial_number

    async def test_changes_are_seen_without_a_signal(
        self, setting: Setting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fedone_sdk.aggregator.http.guards._TLS_CHECK_S", 0.01)
        tls = setting.tls()
        async with serving(tls) as url, tls.watching():
            setting.replace(second := issue("localhost", setting.authority))
            async with asyncio.timeout(10):
                while await serial(url, setting.trust()) != second.certificate.serial_number:
                    await asyncio.sleep(0.01)


class TestConfig:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"key": "missing.key"}, r"tls: the certificate or key cannot be used: .*missing\.key"),
            ({"key": "authority.key"}, "tls: the certificate or key cannot be used"),
            ({"client_ca": "missing.pem"}, "tls.client_ca: cannot be used"),
            ({"client_ca": "server.key"}, "tls.client_ca: cannot be used"),
        ],
    )
    def test_files_that_cannot_be_used(
        self, setting: Setting, changes: dict[str, str], message: str
    ) -> None:
        with pytest.raises(SpecError, match=message):
            setting.tls(**changes)

    def test_certificates_of_devices_need_an_authority(self) -> None:
        document = {"certificate": "c", "key": "k", "require_client_certificate": True}
        with pytest.raises(ValidationError, match="needs client_ca"):
            TlsConfig.model_validate(document)
