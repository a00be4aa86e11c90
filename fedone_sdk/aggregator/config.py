"""CONFIG.yaml: configuration of `fedone serve`."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import NoDecode

from fedone_sdk.aggregator.authority import MAKE_A_TOKEN, Authority, SecretText
from fedone_sdk.aggregator.http.guards import CorsConfig, Limits, ServerTls, TlsConfig
from fedone_sdk.aggregator.replicas import Retention
from fedone_sdk.data import check_examples, load_examples
from fedone_sdk.errors import DataError, FedOneError, MissingExtraError, SpecError, needs_extra
from fedone_sdk.files import user_path
from fedone_sdk.spec import BackendSpec, OwnMethodSpec, RunSpec, Spec, load_yaml, validate_spec
from fedone_sdk.stores import RunRecord, SqlStore
from fedone_sdk.task import Example
from fedone_sdk.vocabulary import PmiVocabulary, Vocabulary


def _store(value: object) -> object:
    if isinstance(value, str) or (isinstance(value, dict) and value.keys() == {"env"}):
        return {"url": value}
    if not isinstance(value, (dict, StoreConfig)):
        raise ValueError("must be a file, a URL, {env: NAME}, or a mapping with url and password")
    return value


def _mapping(value: object) -> object:
    if not isinstance(value, (dict, Authority)):
        raise ValueError("must be a mapping with enrolment_tokens and admin_token")
    return value


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f"must be HOST:PORT, such as 127.0.0.1:8080 (got {value!r})")
    return value


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


Address = Annotated[str, AfterValidator(_address)]
"""``HOST:PORT``; port 0 selects a free port."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class StoreConfig(Spec):
    """Store of runs and clients.

    Attributes:
        url: Path of a SQLite file, or a SQLAlchemy URL of a PostgreSQL database.
        password: Password that is inserted into the URL.
    """

    url: SecretText = SecretStr("fedone.db")
    password: SecretText | None = None

    @property
    def is_file(self) -> bool:
        """Whether the store is a SQLite file."""
        return "://" not in self.url.get_secret_value()

    def build(self, folder: Path, *, serving: bool = True) -> SqlStore:
        """Return the store, not yet opened; `serving` as for `SqlStore.at`.

        Raises:
            SpecError: The URL does not name a supported database.
        """
        url = self.url.get_secret_value()
        password = None if self.password is None else self.password.get_secret_value()
        if self.is_file and password is not None:
            raise SpecError("store.password: a SQLite file has no password; leave it out")
        try:
            where = str(folder / url) if self.is_file else url
            return SqlStore.at(where, password=password, serving=serving)
        except SpecError as exc:
            raise SpecError([f"store: {problem}" for problem in exc.problems]) from None

    async def check(self, folder: Path) -> str:
        """Return a description of the store, without changing it; `SpecError` if it is unusable."""
        store = self.build(folder)
        try:
            return await store.check()
        except FedOneError as exc:
            raise SpecError(str(exc)) from exc

    async def stored(self, folder: Path, run_ids: Iterable[str]) -> list[RunRecord]:
        """Return the stored runs of these names, without changing the store.

        The list is empty if the store does not exist or has an older schema.
        """
        from fedone_sdk.stores.sql import schema

        store = self.build(folder, serving=False)
        if await store.schema() != schema.HEAD:
            return []
        await store.open()
        try:
            records = [await store.run(run_id) for run_id in run_ids]
        finally:
            await store.close()
        return [record for record in records if record is not None]

    def __str__(self) -> str:
        """Return the file or URL, with asterisks in place of a password."""
        return self.url.get_secret_value() if self.is_file else str(self.build(Path()))


class MetricsConfig(Spec):
    """Access to ``/metrics``. On the main port it needs a viewer's token.

    Attributes:
        listen: ``HOST:PORT`` of a separate port for metrics, without tokens and TLS. Only
            Prometheus should be able to reach it. Null serves the metrics on the main port.
    """

    enabled: bool = True
    listen: Address | None = None

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of the separate port, or None if there is none."""
        return _host_and_port(self.listen) if self.enabled and self.listen is not None else None


class TracingConfig(Spec):
    """OpenTelemetry traces, exported to the collector at `endpoint` (OTLP/HTTP).

    If `endpoint` is null, OpenTelemetry's environment variables are used.
    """

    endpoint: Annotated[str, Field(pattern=r"^https?://")] | None = None


class LogConfig(Spec):
    """`level`: the lowest level that is logged; `requests`: the level of each request's line."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    requests: Literal["off", "debug", "info"] = "debug"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunToServe:
    """A run of CONFIG.yaml; its spec has no `data`. `unmeasured` says why `dev` is empty."""

    path: Path
    spec: RunSpec
    vocabulary: Vocabulary
    dev: tuple[Example, ...] = ()
    unmeasured: str | None = None


class ServeConfig(Spec):
    """Configuration of `fedone serve`. Paths are relative to the config's folder.

    Attributes:
        store: A file, a URL, ``{env: NAME}``, or a mapping with the keys of `StoreConfig`.
        tls: Null serves plain HTTP, which is for loopback, or for a server behind a proxy.
        backend: The gateway's model; null if clients query their own models.
        runs: Paths of the RUN.yaml files to serve.
        tracing: Null disables traces, unless OpenTelemetry's environment variables set an endpoint.
        drain_s: Time that pending requests have to finish when the server stops, seconds.
        drain_notice_s: Time from SIGTERM to the start of `drain_s`, seconds. In this time requests
            are accepted, but ``/readyz`` returns 503, so that load balancers send no more.
    """

    listen: Address = "127.0.0.1:8080"
    store: Annotated[StoreConfig, NoDecode, BeforeValidator(_store)] = StoreConfig()
    auth: Annotated[Authority, BeforeValidator(_mapping)] = Authority()
    limits: Limits = Limits()
    cors: CorsConfig = CorsConfig()
    retention: Retention = Retention()
    tls: TlsConfig | None = None
    backend: BackendSpec | None = BackendSpec()
    runs: tuple[str, ...] = ()
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig | None = None
    log: LogConfig = LogConfig()
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 20.0
    drain_notice_s: Annotated[float, Field(ge=0, le=600)] = 0.0

    @model_validator(mode="after")
    def _check_reachable(self) -> Self:
        people = (self.auth.admin_token, *(p for p in self.auth.admin_tokens if p.role == "admin"))
        if not self.auth.enrolment_tokens and not any(people):
            raise ValueError(
                "auth.enrolment_tokens: needs at least one token, or no device can enrol; "
                f"make one with: {MAKE_A_TOKEN} (or set an admin token, to make them later)"
            )
        return self

    @classmethod
    def load(cls, path: str | Path | None = None) -> Self:
        """Load a CONFIG.yaml and the environment variables, which take precedence.

        ``FEDONE_AUTH__ADMIN_TOKEN`` sets the key ``auth.admin_token``. Lists and mappings are JSON.
        A mapping is merged with the file's mapping; other values replace those of the file. An
        unknown ``FEDONE_`` name is an error if it has ``__`` or is similar to a key's name.

        Args:
            path: The file; None uses the environment only.

        Raises:
            SpecError: A key is unknown, or its value is invalid. The text contains no value of an
                environment variable.
        """
        document = {} if path is None else load_yaml(path)
        source = "environment" if path is None else str(path)
        if misspelt := [*_misspelt(cls)]:
            raise SpecError(misspelt, source="environment")
        if from_environment := _from_environment(cls):
            if not isinstance(document, dict):
                raise SpecError("must be a mapping", source=source)
            document = _merged(document, from_environment)
        try:
            return validate_spec(cls, document, source=source)
        except SpecError as exc:
            variables = _variables(cls)
            problems = [_name_variable(problem, variables) for problem in exc.problems]
            raise SpecError(problems, source=source) from None

    @property
    def warnings(self) -> list[str]:
        """Warnings about a missing ``backend`` and about insecure settings on a network."""
        lines = []
        if "backend" not in self.model_fields_set:
            lines.append(
                "backend: is not set, so the gateway uses the small embedded model; to keep it, "
                "set backend: {kind: onnx}; if clients have their own models, set backend: null"
            )
        host, _ = self.address
        if _is_loopback(host):
            return lines
        weak = [] if self.tls is not None else self.auth.guessable
        return [
            *lines,
            *(
                f"auth.{key}: can be guessed, and {self.listen} is open to a network, without TLS; "
                f"make a secure token with: {MAKE_A_TOKEN}"
                for key in weak
            ),
            *(
                f"auth.enrolment_tokens.{at}: if this token leaks, anyone can enrol any number of "
                "devices with it; set its key uses to the number of your devices"
                for at, token in enumerate(self.auth.enrolment_tokens)
                if token.uses is None
            ),
        ]

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        return _host_and_port(self.listen)

    def server_tls(self, folder: Path) -> ServerTls | None:
        """Return the TLS context if TLS is configured; a `SpecError` if its files are invalid."""
        return None if self.tls is None else ServerTls(self.tls, folder)

    def load_runs(
        self, folder: Path, source: str = "config"
    ) -> tuple[list[RunToServe], list[FedOneError]]:
        """Return the runs that can be served, and the errors of the other runs."""
        runs: dict[str, RunToServe] = {}
        errors: list[FedOneError] = []
        for number, name in enumerate(self.runs):
            path = folder / name
            try:
                run = self._load_run(path, folder)
            except SpecError as exc:
                errors.append(SpecError(exc.problems, source=str(path)))
                continue
            except FedOneError as exc:
                errors.append(exc)
                continue
            other = runs.setdefault(run.spec.name, run)
            if other is not run:
                paths = f"{run.path} and {other.path}"
                text = f"runs.{number}: {paths} have the same name, {run.spec.name!r}"
                errors.append(SpecError(text, source=source))
        return list(runs.values()), errors

    def _load_run(self, path: Path, folder: Path) -> RunToServe:
        spec = RunSpec.load(path).served()
        if isinstance(spec.method, OwnMethodSpec):
            from fedone_sdk.algorithms import load_method

            load_method(spec.method, path.parent)
        if (
            self.backend is not None
            and "backend" in spec.model_fields_set
            and _model_of(spec.backend, path.parent) != _model_of(self.backend, folder)
        ):
            # The gateway has only one model.
            raise SpecError("backend: differs from the server's; leave it out of the RUN.yaml")
        texts = _public_text(spec, path.parent)
        try:
            vocabulary = spec.prompt.build(spec.task, texts, path.parent)
        except (DataError, SpecError) as exc:
            key = "prompt" if spec.prompt.slots else "prompt.vocabulary"
            raise SpecError(f"{key}: {exc}") from exc
        dev, unmeasured = _dev_rows(spec, path.parent)
        if self.backend is None:
            dev, unmeasured = (), "the server has no model (backend: null)"
        changes = {"data": None, **({} if self.backend is None else {"backend": self.backend})}
        return RunToServe(
            path=path,
            spec=spec.model_copy(update=changes),
            vocabulary=vocabulary,
            dev=dev,
            unmeasured=unmeasured,
        )


def _dev_rows(spec: RunSpec, folder: Path) -> tuple[tuple[Example, ...], str | None]:
    """Return the rows of `data.dev` (the file may be on another machine), or why there are none."""
    source = None if spec.data is None else spec.data.dev
    if source is None:
        return (), "RUN.yaml names no data.dev"
    if not source.startswith("hf:") and not (folder / source).is_file():
        return (), f"data.dev: there is no file {source}"
    try:
        return tuple(_rows(spec, folder, "dev", source)), None
    except MissingExtraError as exc:
        return (), f"data.dev: {exc}"


def _public_text(spec: RunSpec, folder: Path) -> list[str]:
    """Return the texts of `data.train` if candidates are extracted from them, else no texts."""
    counted = [
        (key, source.kind)
        for key, source in spec.prompt.sources
        if isinstance(source, PmiVocabulary)
    ]
    if not counted:
        return []
    if spec.data is None or spec.data.train is None:
        key, kind = counted[0]
        raise SpecError(f"{key}.kind: {kind} counts words of public texts, so it needs data.train")
    rows = _rows(spec, folder, "train", spec.data.train)
    return [str(row[name]) for row in rows for name in spec.task.fields]


def _rows(
    spec: RunSpec, folder: Path, key: Literal["dev", "train"], source: str
) -> Sequence[Example]:
    split = "train" if key == "train" else "validation"
    try:
        rows = load_examples(source, split=split, folder=folder)
        check_examples(spec.task, rows, source)
    except DataError as exc:
        raise SpecError(f"data.{key}: {exc}") from exc
    return rows


def _model_of(backend: BackendSpec, folder: Path) -> dict[str, Any]:
    """Return the fields that identify a backend's model, with absolute paths."""
    names = {"kind", "model", "base_url", "object", "options"}
    document = backend.model_dump(include=names)
    if backend.kind == "onnx" and backend.model is not None:
        document["model"] = (folder / user_path(backend.model)).resolve()
    return document


_PREFIX = "FEDONE_"
_DELIMITER = "__"
_SIMILAR = 0.75
"""A variable whose name is at least this similar to the name of a key counts as misspelt."""

_FIELD = re.compile(r'field "(\w+)"')


def _from_environment(model: type[BaseModel]) -> dict[str, Any]:
    with needs_extra("settings from the environment", "server"):
        from pydantic_settings import EnvSettingsSource, SettingsError

    source = EnvSettingsSource(
        cast(Any, model),  # Only its fields are used.
        env_prefix=_PREFIX,
        env_nested_delimiter=_DELIMITER,
        env_parse_none_str="null",
    )
    try:
        return source()
    except SettingsError as exc:
        # The exception's text and cause are left out, because they may contain a secret.
        match = _FIELD.search(str(exc))
        names = [
            name
            for name, key in _variables(model).items()
            if match is None or key.partition(".")[0] == match[1]
        ]
        raise SpecError(
            f'{", ".join(names)}: a list or mapping must be JSON, such as ["one", "two"]',
            source="environment",
        ) from None


def _variables(model: type[BaseModel]) -> dict[str, str]:
    """Return the environment variables that set keys of the model: variable -> key."""
    keys = {
        name: name.upper().removeprefix(_PREFIX).lower().replace(_DELIMITER, ".")
        for name in os.environ
        if name.upper().startswith(_PREFIX)
    }
    return {name: key for name, key in keys.items() if key.partition(".")[0] in model.model_fields}


def _misspelt(model: type[BaseModel]) -> Iterator[str]:
    """Yield an error for each unknown variable with ``__`` or with a name similar to a key.

    Other ``FEDONE_`` variables are allowed: commands read some of them, and Kubernetes sets some.
    """
    for name in os.environ:
        key, nested, _ = name.upper().removeprefix(_PREFIX).lower().partition(_DELIMITER)
        if not name.upper().startswith(_PREFIX) or key in model.model_fields:
            continue
        similar = get_close_matches(key, model.model_fields, 1, _SIMILAR)
        if similar:
            yield f"{name}: unknown key; did you mean {_PREFIX}{similar[0].upper()}?"
        elif nested:
            yield f"{name}: unknown key (allowed: {', '.join(sorted(model.model_fields))})"


def _merged(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(document)
    for key, value in changes.items():
        current = merged.get(key)
        if isinstance(value, Mapping) and isinstance(current, Mapping):
            value = _merged(current, value)
        merged[key] = value
    return merged


def _name_variable(problem: str, variables: Mapping[str, str]) -> str:
    key, colon, text = problem.partition(": ")
    for name, variable_key in variables.items():
        if colon and (key == variable_key or key.startswith(f"{variable_key}.")):
            return f"{key} (from {name}): {text}"
    return problem
