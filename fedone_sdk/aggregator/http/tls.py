"""Serving https: certificates from files, read again when they change."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import structlog
from pydantic import model_validator

from fedone_sdk.errors import SpecError
from fedone_sdk.spec import Spec

__all__ = ["ServerTls", "TlsConfig"]

_log = structlog.get_logger(__name__)


class TlsConfig(Spec):
    """Serves ``https``: TLS 1.2 and newer, or TLS 1.3 where devices show certificates.

    Attributes:
        certificate: PEM file with the certificate and its chain.
        key: PEM file with its private key.
        client_ca: PEM file with the authorities that sign devices' certificates; null asks devices
            for none.
        require_client_certificate: Whether a device without a certificate is refused. It is never
            instead of its credential.
    """

    certificate: str
    key: str
    client_ca: str | None = None
    require_client_certificate: bool = True

    @model_validator(mode="after")
    def _check_authorities(self) -> Self:
        if self.client_ca is None and "require_client_certificate" in self.model_fields_set:
            raise ValueError("require_client_certificate: needs client_ca, which says whose")
        return self

    def open(self, folder: Path) -> ServerTls:
        """Reads the files.

        Args:
            folder: Where relative paths start.

        Raises:
            SpecError: The files cannot be used.
        """
        return ServerTls(self, folder)


class ServerTls:
    """Certificates that can change while connections are accepted.

    New connections get the newest files that could be used, all of them together; connections
    that are open keep what they began with.

    Args:
        config: Names the files.
        folder: Where relative paths start.

    Attributes:
        context: What a server is given, once.

    Raises:
        SpecError: The files cannot be used.
    """

    def __init__(self, config: TlsConfig, folder: Path) -> None:
        self._config = config
        self._certificate = folder / Path(config.certificate).expanduser()
        self._key = folder / Path(config.key).expanduser()
        self._client_ca = (
            None if config.client_ca is None else folder / Path(config.client_ca).expanduser()
        )
        self._seen = self._stamps()
        self._newest = self._load()
        self.context = self._load()
        # For each connection: also authorities that were taken out are then gone.
        self.context.sni_callback = self._give_newest
        if self._client_ca is not None:
            # A session taken up again shows no certificate: it would outlive its authority. For
            # TLS 1.2 Python cannot turn that off.
            self.context.minimum_version = ssl.TLSVersion.TLSv1_3
            self.context.num_tickets = 0

    def reload(self) -> bool:
        """Reads the files again if they have changed.

        Returns:
            Whether new ones are served from now on; files that cannot be used are told in the
            log, and the old ones are kept.
        """
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        try:
            newest = self._load()
        except SpecError as exc:
            # Perhaps only half of them is written yet; they are looked at again.
            _log.error("the changed TLS files cannot be used", reason=exc.problems[0])
            return False
        self._seen = stamps
        self._newest = newest
        _log.info("TLS files read again", certificate=str(self._certificate))
        return True

    @asynccontextmanager
    async def watching(self, *, every_s: float = 5.0) -> AsyncIterator[None]:
        """Reads changed files again while the body runs.

        Args:
            every_s: How often it looks, seconds.
        """
        watcher = asyncio.create_task(self._watch(every_s), name="TLS files")
        try:
            yield
        finally:
            watcher.cancel()

    async def _watch(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await asyncio.to_thread(self.reload)

    def _give_newest(
        self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._certificate, self._key)
        except (OSError, ssl.SSLError) as exc:
            raise SpecError(f"tls: the certificate or key cannot be used: {exc}") from exc
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ssl.SSLError) as exc:
                raise SpecError(f"tls.client_ca: cannot be used: {exc}") from exc
            required = self._config.require_client_certificate
            context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
        return context

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        files = (self._certificate, self._key, self._client_ca)
        return [None if file is None else _stamp(file) for file in files]


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
