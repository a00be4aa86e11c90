"""How a device gets through to its server: proxies, trusted authorities, its own certificate."""

from __future__ import annotations

import base64
import ssl
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from yarl import URL

from fedone_sdk.errors import SpecError

__all__ = ["Network", "Proxy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """An HTTP proxy.

    Attributes:
        url: Where it is, without user and password.
        authorization: Value of ``Proxy-Authorization``; None sends none.
    """

    url: URL
    authorization: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, text: str, key: str = "proxy") -> Proxy:
        """Reads ``http://user:password@host:port``.

        Args:
            text: The proxy; it may hold a secret, which no error repeats.
            key: What the user calls it.

        Raises:
            SpecError: It is no URL of an HTTP proxy.
        """
        try:
            url = URL(text)
            if url.scheme not in ("http", "https") or not url.host or url.port is None:
                raise ValueError
        except ValueError:
            raise SpecError(
                f"{key}: is not a proxy; allowed is http://[user:password@]host:port",
                source="arguments",
            ) from None
        secret = None
        if url.user is not None or url.password is not None:
            pair = f"{url.user or ''}:{url.password or ''}".encode()
            secret = "Basic " + base64.b64encode(pair).decode("ascii")
        return cls(url=url.with_user(None).origin(), authorization=secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The way to a server.

    Attributes:
        proxy: ``http://[user:password@]host:port`` for all requests.
        trust_env: Without `proxy`: whether ``HTTPS_PROXY``, ``HTTP_PROXY`` and ``NO_PROXY`` (or
            the system's settings, where Python reads them) name one.
        ca_file: The authorities that are trusted instead of the system's, a PEM file.
        cert_file: This device's certificate for a server that asks for one (mTLS), a PEM file.
        key_file: Its private key; None where `cert_file` holds it too.
        key_password: Opens the key.
        ssl_context: Trust and certificate by the app, instead of the four above.
        timeout_s: Longest wait for an answer, on top of what a long poll asks for.
    """

    proxy: str | None = field(default=None, repr=False)
    trust_env: bool = True
    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    key_password: str | None = field(default=None, repr=False)
    ssl_context: ssl.SSLContext | None = None
    timeout_s: float = 60.0

    def proxy_for(self, server: URL) -> Proxy | None:
        """The proxy on the way to a server.

        Raises:
            SpecError: What is named is no proxy.
        """
        if self.proxy is not None:
            return Proxy.of(self.proxy)
        # Not by aiohttp: it would also look for the server's password in ~/.netrc, and fail over
        # one that it finds.
        host = f"{server.host}:{server.port}"
        if not self.trust_env or urllib.request.proxy_bypass(host):
            return None
        named = urllib.request.getproxies().get(server.scheme)
        return None if named is None else Proxy.of(named, f"{server.scheme.upper()}_PROXY")

    def context(self) -> ssl.SSLContext | None:
        """Trust and certificate; None is the system's trust.

        Raises:
            SpecError: A file is missing or not what it should be.
        """
        files = (self.ca_file, self.cert_file, self.key_file)
        if self.ssl_context is not None:
            if any(file is not None for file in files):
                raise SpecError(
                    "ssl_context: stands alone, without ca_file, cert_file and key_file",
                    source="arguments",
                )
            return self.ssl_context
        if self.ca_file is None and self.cert_file is None:
            if self.key_file is not None:
                raise SpecError("key_file: goes with cert_file", source="arguments")
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as exc:  # SSLError is one
            raise _unusable("ca_file", self.ca_file, exc) from exc
        if self.cert_file is not None:
            try:
                # Without a password OpenSSL would ask for one on the terminal.
                password = self.key_password or ""
                context.load_cert_chain(self.cert_file, self.key_file, password)
            except OSError as exc:
                raise _unusable("cert_file", self.cert_file, exc) from exc
        return context


def _unusable(key: str, file: str | Path | None, cause: OSError) -> SpecError:
    return SpecError(f"{key}: {file} cannot be used: {cause}", source="arguments")
