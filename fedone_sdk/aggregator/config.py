"""CONFIG.yaml: what `fedone serve` serves, and to whom."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, SecretStr, model_validator

from fedone_sdk.data import check_examples, load_examples
from fedone_sdk.errors import DataError, SpecError
from fedone_sdk.spec import BackendSpec, OnnxSpec, RunSpec, Spec, load_yaml, validate_spec
from fedone_sdk.stores import SqlStore
from fedone_sdk.vocabulary import PmiVocabulary, TopVocabulary, Vocabulary, build_vocabulary

__all__ = [
    "Address",
    "AuthConfig",
    "MAKE_A_TOKEN",
    "RunToServe",
    "ServeConfig",
    "TlsConfig",
    "Token",
    "host_and_port",
]

MAKE_A_TOKEN = """python3 -c "import secrets; print(secrets.token_urlsafe(32))\""""
"""How a person makes one, for messages."""


def _token(value: object) -> object:
    # Every mistake is a ValueError of our own: pydantic's would print what it was given.
    if isinstance(value, dict) and value.keys() == {"env"} and isinstance(value["env"], str):
        if value["env"] not in os.environ:
            raise ValueError(f"the environment variable {value['env']} is not set")
        value = os.environ[value["env"]]
    if not isinstance(value, str):
        raise ValueError("must be a token in quotes, or {env: NAME} to read it from NAME")
    if not value.isascii() or not value or any(c.isspace() for c in value):
        raise ValueError("a token is not empty, and has neither spaces nor non-ASCII characters")
    return value


def _tokens(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        raise ValueError("must be a list of tokens")
    return tuple(value)


def _mapping(value: object) -> object:
    if not isinstance(value, (dict, AuthConfig)):
        raise ValueError("must be a mapping with enrolment_tokens and admin_token")
    return value


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f"must be HOST:PORT, such as 127.0.0.1:8080 (got {value!r})")
    return value


def host_and_port(address: str) -> tuple[str, int]:
    """The two halves of an `Address`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


Address = Annotated[str, AfterValidator(_address)]
"""``HOST:PORT``; port 0 picks a free one."""

Token = Annotated[SecretStr, BeforeValidator(_token)]
"""A secret: text, or ``{env: NAME}`` to keep it out of the file. No error ever shows it."""


class AuthConfig(Spec):
    """Who may come in. A token is text, or ``{env: NAME}`` to keep it out of the file.

    Attributes:
        enrolment_tokens: Secrets that let a device enrol.
        admin_token: Secret that lets a person steer runs over HTTP; null shuts these routes.
    """

    enrolment_tokens: Annotated[tuple[Token, ...], BeforeValidator(_tokens)] = ()
    admin_token: Token | None = None

    @model_validator(mode="after")
    def _check_apart(self) -> Self:
        if self.admin_token in self.enrolment_tokens:
            raise ValueError("admin_token must not be one that devices enrol with")
        return self


class TlsConfig(Spec):
    """Serves ``https``.

    Attributes:
        certificate: PEM file with the certificate and its chain.
        key: PEM file with its private key.
    """

    certificate: str
    key: str

    def context(self, folder: Path) -> ssl.SSLContext:
        """What serves ``https``.

        Args:
            folder: Where relative paths start.

        Raises:
            SpecError: The files cannot be used.
        """
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(folder / self.certificate, folder / self.key)
        except (OSError, ssl.SSLError) as exc:
            raise SpecError(f"tls: the certificate or key cannot be used: {exc}") from exc
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class RunToServe:
    """A run of the config with its vocabulary in place.

    Attributes:
        path: Its RUN.yaml.
        spec: The run, without data: clients bring their own.
        vocabulary: The candidates.
    """

    path: Path
    spec: RunSpec
    vocabulary: Vocabulary


class ServeConfig(Spec):
    """What `fedone serve` does. Relative paths start at the config's folder.

    Attributes:
        listen: ``HOST:PORT``; port 0 picks a free one.
        store: SQLite file, or a SQLAlchemy URL, that keeps runs and clients.
        auth: Tokens.
        tls: Certificate; null serves plain HTTP, for loopback or behind a proxy.
        backend: The gateway's model; null when clients bring their own.
        runs: RUN.yaml files.
    """

    listen: Address = "127.0.0.1:8080"
    store: str = "fedone.db"
    auth: Annotated[AuthConfig, BeforeValidator(_mapping)] = AuthConfig()
    tls: TlsConfig | None = None
    backend: BackendSpec | None = OnnxSpec()
    runs: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_reachable(self) -> Self:
        if not self.auth.enrolment_tokens:
            raise ValueError(
                "auth.enrolment_tokens: needs at least one, or no device can enrol; "
                f"make one with: {MAKE_A_TOKEN}"
            )
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a CONFIG.yaml.

        Raises:
            SpecError: One line per mistake: file, key, what is allowed; never a token.
        """
        return validate_spec(cls, load_yaml(path), source=str(path))

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        return host_and_port(self.listen)

    def build_store(self, folder: Path) -> SqlStore:
        """The store, not opened yet.

        Raises:
            SpecError: The URL is not one of a supported database.
        """
        if "://" not in self.store:
            return SqlStore.sqlite(folder / self.store)
        try:
            return SqlStore(self.store)
        except SpecError as exc:
            raise SpecError([f"store: {problem}" for problem in exc.problems]) from exc

    def ssl_context(self, folder: Path) -> ssl.SSLContext | None:
        """What serves ``https``, if it is configured.

        Raises:
            SpecError: The files cannot be used.
        """
        return None if self.tls is None else self.tls.context(folder)

    def load_runs(self, folder: Path) -> list[RunToServe]:
        """Reads the runs and builds their vocabularies.

        Raises:
            SpecError: A run or its public text cannot be used, or two have one name.
        """
        runs: dict[str, RunToServe] = {}
        for number, name in enumerate(self.runs):
            run = self._load_run(folder / name, folder)
            other = runs.setdefault(run.spec.name, run)
            if other is not run:
                raise SpecError(
                    f"runs.{number}: {run.path} and {other.path} share the name {run.spec.name!r}"
                )
        return list(runs.values())

    def _load_run(self, path: Path, folder: Path) -> RunToServe:
        spec = RunSpec.load(path)
        if (
            self.backend is not None
            and "backend" in spec.model_fields_set
            and _resolved(spec.backend, path.parent) != _resolved(self.backend, folder)
        ):
            # The gateway has one model; a run that was described with another must not start.
            raise SpecError(
                "backend: is not the one that the server's config names; leave it out here",
                source=str(path),
            )
        try:
            vocabulary = build_vocabulary(
                spec.prompt.vocabulary, _public_text(spec, path), path.parent
            )
        except DataError as exc:
            raise SpecError(f"prompt.vocabulary: {exc}", source=str(path)) from exc
        spec = spec.model_copy(update={"data": None})
        return RunToServe(path=path, spec=spec, vocabulary=vocabulary)


def _public_text(spec: RunSpec, path: Path) -> list[str]:
    """The texts that a counted vocabulary is built from: never clients', the server has none."""
    kind = spec.prompt.vocabulary
    if not isinstance(kind, (PmiVocabulary, TopVocabulary)):
        return []
    if spec.data is None:
        raise SpecError(
            f"prompt.vocabulary.kind: {kind.kind} counts public text, so it needs data.train; "
            "file and list do not",
            source=str(path),
        )
    source = spec.data.train
    try:
        rows = load_examples(source if source.startswith("hf:") else path.parent / source)
        check_examples(spec.task, rows, source)
    except DataError as exc:
        raise SpecError(f"data.train: {exc}", source=str(path)) from exc
    return [str(row[name]) for row in rows for name in spec.task.fields]


def _resolved(backend: BackendSpec, folder: Path) -> dict[str, Any]:
    """What says which model it is, however its path was written."""
    names = {"kind", "model", "base_url", "url", "revision"}
    document = backend.model_dump(include=names)
    if isinstance(backend, OnnxSpec) and backend.model is not None:
        document["model"] = (folder / backend.model).expanduser().resolve()
    return document
