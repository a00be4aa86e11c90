"""TLS: certificates from files, reloaded when they change."""

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
from fedone_sdk.files import user_path
from fedone_sdk.spec import Spec

_log = structlog.get_logger(__name__)


class TlsConfig(Spec):
    """TLS 1.2 or newer; TLS 1.3 with client certificates.

    Attributes:
        certificate: PEM file with the certificate and its chain.
        key: PEM file with its private key.
        client_ca: PEM file with the authorities of client certificates; null requests none.
        require_client_certificate: Whether devices without a certificate are refused. A certificate
            does not replace the credential.
    """

    certificate: str
    key: str
    client_ca: str | None = None
    require_client_certificate: bool = True

    @model_validator(mode="after")
    def _check_authorities(self) -> Self:
        if self.client_ca is None and "require_client_certificate" in self.model_fields_set:
            raise ValueError("require_client_certificate: needs client_ca")
        return self

    def open(self, folder: Path) -> ServerTls:
        """Load the files; a `SpecError` if they cannot be used."""
        return ServerTls(self, folder)


class ServerTls:
    """A TLS context whose certificates can be reloaded.

    New connections use the newest valid set of files; open connections keep theirs.

    Raises:
        SpecError: The files cannot be used.
    """

    def __init__(self, config: TlsConfig, folder: Path) -> None:
        self._config = config
        self._certificate = folder / user_path(config.certificate)
        self._key = folder / user_path(config.key)
        self._client_ca = None if config.client_ca is None else folder / user_path(config.client_ca)
        self._seen = self._stamps()
        self._newest = self._load()
        self.context = self._load()
        # Per connection, so that removed authorities take effect.
        self.context.sni_callback = self._give_newest
        if self._client_ca is not None:
            # A resumed session skips the certificate check. Python cannot disable resumption for
            # TLS 1.2, hence TLS 1.3.
            self.context.minimum_version = ssl.TLSVersion.TLSv1_3
            self.context.num_tickets = 0

    def reload(self) -> bool:
        """Reload the files if they have changed; return whether new files are in use.

        Invalid files are logged and the old ones are kept.
        """
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        try:
            newest = self._load()
        except SpecError as exc:
            # The files may be half written; the next check tries again.
            _log.error("the changed TLS files cannot be used", reason=exc.problems[0])
            return False
        self._seen = stamps
        self._newest = newest
        _log.info("TLS files read again", certificate=str(self._certificate))
        return True

    @asynccontextmanager
    async def watching(self, *, every_s: float = 5.0) -> AsyncIterator[None]:
        """Reload changed files while the body runs."""
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
