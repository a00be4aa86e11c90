"""CONFIG.yaml and the environment: precedence, and the texts of errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedone_sdk.aggregator.config import ServeConfig, StoreConfig
from fedone_sdk.errors import SpecError
from fedone_sdk.spec import BackendSpec
from fedone_sdk.stores import SqlStore
from fedone_sdk.stores.sql import schema
from tests.postgres import Cluster

SECRET = "s3cret-4711"
FILE = f"""\
listen: 127.0.0.1:1
store: fedone.db
auth: {{enrolment_tokens: [enrol-me], admin_token: {SECRET}}}
runs: [run.yaml]
log: {{level: debug}}
"""

Set = pytest.MonkeyPatch


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    return path


GUESSED = ["auth.enrolment_tokens.0", "auth.admin_token"]


@pytest.mark.parametrize(
    ("listen", "more", "warned"),
    [
        ("0.0.0.0:80", "", [*GUESSED, "auth.enrolment_tokens.1"]),
        ("fedone.example:80", "", [*GUESSED, "auth.enrolment_tokens.1"]),
        ("127.0.0.1:80", "", []),
        ("[::1]:80", "", []),
        ("0.0.0.0:80", "tls: {certificate: c.pem, key: k.pem}", ["auth.enrolment_tokens.1"]),
    ],
)
def test_weak_tokens(tmp_path: Path, listen: str, more: str, warned: list[str]) -> None:
    strong = "oPq4-zK81vTtX0aLw9Yc"
    tokens = f"enrolment_tokens: [{{token: enrol-me, uses: 9}}, {strong}]"
    tokens += f", admin_token: {'ab' * 20}"
    path = tmp_path / "config.yaml"
    path.write_text(f"listen: '{listen}'\nauth: {{{tokens}}}\nbackend: null\n{more}\n")
    found = ServeConfig.load(path).warnings
    assert [line.partition(":")[0] for line in found] == warned
    assert not any(secret in str(found) for secret in ("enrol-me", "abab"))


def test_a_model_that_is_not_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("auth: {enrolment_tokens: [oPq4-zK81vTtX0aLw9Yc]}\n")
    (warning,) = ServeConfig.load(path).warnings
    assert warning.startswith("backend: is not set")


class TestPrecedence:
    def test_the_file_alone(self, file: Path) -> None:
        config = ServeConfig.load(file)
        assert (config.listen, config.runs) == ("127.0.0.1:1", ("run.yaml",))
        assert config.log.level == "debug"
        assert (config.drain_s, config.log.requests) == (20, "debug")
        assert not any(config.retention.model_dump().values())  # Nothing is removed by default.

    def test_the_environment_has_the_last_word(self, file: Path, monkeypatch: Set) -> None:
        monkeypatch.setenv("FEDONE_LISTEN", "0.0.0.0:2")
        monkeypatch.setenv("FEDONE_RUNS", '["other.yaml", "more.yaml"]')
        monkeypatch.setenv("FEDONE_LOG__REQUESTS", "info")
        monkeypatch.setenv("FEDONE_DRAIN_S", "1.5")
        monkeypatch.setenv("FEDONE_AUTH__ADMIN_TOKEN", "another")
        config = ServeConfig.load(file)
        assert (config.listen, config.runs) == ("0.0.0.0:2", ("other.yaml", "more.yaml"))
        assert config.drain_s == 1.5
        # Mappings are merged: what the variables do not name stays.
        assert (config.log.level, config.log.requests) == ("debug", "info")
        assert config.auth.admin_token is not None
        assert config.auth.admin_token.get_secret_value() == "another"
        assert len(config.auth.enrolment_tokens) == 1

    def test_the_environment_alone(self, monkeypatch: Set) -> None:
        monkeypatch.setenv("FEDONE_AUTH__ENROLMENT_TOKENS", '["one", "two"]')
        monkeypatch.setenv("FEDONE_BACKEND__KIND", "openai")
        monkeypatch.setenv("FEDONE_BACKEND__MODEL", "gpt-4o-mini")
        monkeypatch.setenv("FEDONE_BACKEND__RETRY__ATTEMPTS", "3")
        config = ServeConfig.load()
        assert config.backend.kind == "openai"
        assert config.backend.retry.attempts == 3
        assert len(config.auth.enrolment_tokens) == 2

    def test_no_backend(self, file: Path, monkeypatch: Set) -> None:
        monkeypatch.setenv("FEDONE_BACKEND", "null")
        assert ServeConfig.load(file).backend is None

    def test_other_variables_of_ours(self, file: Path, monkeypatch: Set) -> None:
        """Commands have variables of their own that name no key."""
        monkeypatch.setenv("FEDONE_TOKEN", "x")
        monkeypatch.setenv("FEDONE_ADMIN_TOKEN", "x")
        assert ServeConfig.load(file).listen == "127.0.0.1:1"


class TestMistakes:
    def test_a_missing_variable_is_named_under_the_key_that_was_written(self, file: Path) -> None:
        file.write_text("auth: {enrolment_tokens: [{env: FEDONE_NOT_THERE}]}")
        with pytest.raises(SpecError, match=r"auth\.enrolment_tokens\.0: the environment variable"):
            ServeConfig.load(file)

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("LISTN", SECRET, "environment: FEDONE_LISTN: unknown key; did you mean "
             "FEDONE_LISTEN?"),
            ("ATUH__ADMIN_TOKEN", SECRET, "environment: FEDONE_ATUH__ADMIN_TOKEN: unknown key; did "
             "you mean FEDONE_AUTH?"),
            ("DATABASE__URL", SECRET, "environment: FEDONE_DATABASE__URL: unknown key (allowed: "),
            ("LISTEN", "here", "{file}: listen (from FEDONE_LISTEN): must be HOST:PORT"),
            ("LOG__LEVLE", "info", "{file}: log.levle (from FEDONE_LOG__LEVLE): unknown key"),
            ("AUTH__ADMIN_TOKEN", f"{SECRET} x", "{file}: auth.admin_token (from FEDONE_AUTH__"),
            ("AUTH__ENROLMENT_TOKENS", f'["{SECRET} x"]', "{file}: auth.enrolment_tokens.0 (from"),
            ("AUTH__ENROLMENT_TOKENS", SECRET,
             "environment: FEDONE_AUTH__ENROLMENT_TOKENS: a list"),
        ],
    )  # fmt: skip
    def test_they_name_the_variable(
        self, file: Path, monkeypatch: Set, name: str, value: str, message: str
    ) -> None:
        monkeypatch.setenv("FEDONE_METRICS_PORT", "tcp://10.0.0.1:9090")  # Of a Kubernetes Service.
        monkeypatch.setenv(f"FEDONE_{name}", value)
        with pytest.raises(SpecError) as caught:
            ServeConfig.load(file)
        assert str(caught.value).startswith(message.format(file=file))
        assert len(caught.value.problems) == 1
        assert SECRET not in str(caught.value)
        assert message[0] == "{" or caught.value.__cause__ is None

    def test_without_a_file_the_environment_is_named(self) -> None:
        with pytest.raises(SpecError, match=r"^environment: .*needs at least one"):
            ServeConfig.load()

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("metrics: {listen: here}", "metrics.listen: must be HOST:PORT"),
            ("tracing: {endpoint: here}", "tracing.endpoint: "),
        ],
    )
    def test_in_the_file(self, file: Path, line: str, message: str) -> None:
        file.write_text(f"auth: {{enrolment_tokens: [{SECRET}]}}\n{line}\n")
        with pytest.raises(SpecError) as caught:
            ServeConfig.load(file)
        assert str(caught.value).startswith(f"{file}: {message}")
        assert SECRET not in str(caught.value)

    def test_disabled_metrics_have_no_port(self, file: Path) -> None:
        metrics = "metrics: {enabled: false, listen: 127.0.0.1:9090}"
        file.write_text(f"auth: {{enrolment_tokens: [a]}}\n{metrics}\n")
        assert ServeConfig.load(file).metrics.address is None


class TestStore:
    def load(self, file: Path, store: object) -> StoreConfig:
        file.write_text(f"auth: {{enrolment_tokens: [a]}}\nstore: {json.dumps(store)}\n")
        return ServeConfig.load(file).store

    def test_a_file(self, file: Path) -> None:
        store = self.load(file, "my störe.db")
        assert store.is_file
        assert str(store) == "my störe.db"
        assert isinstance(store.build(file.parent), SqlStore)

    @pytest.mark.parametrize(
        "store",
        [
            f"postgresql://fedone:{SECRET}@db.example/fedone",
            {"url": "postgresql://fedone@db.example/fedone", "password": SECRET},
            {"url": "postgresql://fedone@db.example/fedone", "password": {"env": "THE_PASSWORD"}},
            {"env": "THE_URL"},
        ],
        ids=str,
    )
    def test_a_server(self, file: Path, monkeypatch: Set, store: object) -> None:
        monkeypatch.setenv("THE_PASSWORD", SECRET)
        monkeypatch.setenv("THE_URL", f"postgresql://fedone:{SECRET}@db.example/fedone")
        found = self.load(file, store)
        assert not found.is_file
        assert str(found) == "postgresql://fedone:***@db.example/fedone"
        assert SECRET not in repr(found)
        assert SECRET in found.build(Path())._url.render_as_string(hide_password=False)
        assert SECRET not in repr(found.build(file.parent))

    def test_a_password_from_its_variable(self, file: Path, monkeypatch: Set) -> None:
        monkeypatch.setenv("FEDONE_STORE__PASSWORD", "p@ss/word:1")
        found = self.load(file, {"url": "postgresql://fedone@db.example/fedone"})
        assert found.build(Path())._url.password == "p@ss/word:1"

    @pytest.mark.parametrize(
        ("store", "message"),
        [
            (f"mysql://fedone:{SECRET}@x/y", "store: mysql is not supported"),
            (f"postgresql://fedone:{SECRET}@x:port/y", "store: must be a file, or a URL such as"),
            ({"url": "fedone.db", "password": SECRET}, "store.password: a SQLite file has no"),
        ],
    )
    def test_mistakes(self, file: Path, store: object, message: str) -> None:
        with pytest.raises(SpecError) as caught:
            self.load(file, store).build(file.parent)
        assert message in str(caught.value)
        assert SECRET not in str(caught.value)

    async def test_probing_a_file_changes_nothing(self, tmp_path: Path) -> None:
        store = StoreConfig.model_validate({"url": "fedone.db"})
        assert await store.check(tmp_path) == f"would create the tables in {tmp_path}/fedone.db"
        assert contents(tmp_path) == {}
        made = SqlStore.sqlite(tmp_path / "fedone.db")
        await made.open()
        await made.close()
        before = contents(tmp_path)
        assert await store.check(tmp_path) == f"would use {tmp_path}/fedone.db"
        assert contents(tmp_path) == before
        with pytest.raises(SpecError, match=r"store .*nowhere.* cannot be read and written"):
            await store.check(tmp_path / "nowhere")
        with pytest.raises(SpecError, match=r"store .* cannot be used: it is a folder"):
            await StoreConfig.model_validate({"url": "."}).check(Path())
        (tmp_path / "fedone.db").write_text("not a database, but long enough to be looked at")
        with pytest.raises(SpecError, match="is not a database"):
            await store.check(tmp_path)

    async def test_a_server_that_is_not_there(self) -> None:
        url = f"postgresql://fedone:{SECRET}@127.0.0.1:9/fedone"
        with pytest.raises(SpecError, match=r"store 127\.0\.0\.1/fedone cannot be used") as e:
            await StoreConfig.model_validate({"url": url}).check(Path())
        assert SECRET not in str(e.value)

    async def test_a_server_that_is_there(
        self, postgres: Cluster, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        good = postgres.tcp_url(database)
        config = StoreConfig.model_validate({"url": good})
        assert (await config.check(Path())) == f"would create the tables in 127.0.0.1/{database}"
        await SqlStore.at(postgres.url(database)).upgrade()
        assert (await config.check(Path())) == f"would use 127.0.0.1/{database}"
        for url, refusal in (
            (postgres.tcp_url(database, password=SECRET), r"cannot be used: .*password"),
            (f"{good}?default_transaction_read_only=on", "in a read-only transaction"),
        ):
            with pytest.raises(SpecError, match=refusal) as caught:
                await StoreConfig.model_validate({"url": url}).check(Path())
            assert SECRET not in str(caught.value)
        monkeypatch.setattr(schema, "HEAD", "0002")
        with pytest.raises(SpecError, match=r"has schema 0001; run `fedone db upgrade`"):
            await config.check(Path())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_has_the_model_of_its_server_and_its_dev_rows(tmp_path: Path) -> None:
    """A report of it has a program for that model."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "dev.jsonl").write_text('{"text": "fine", "label": 1}\n')
    (tmp_path / "runs" / "run.yaml").write_text(
        'task: {template: "{prompt} {text}", labels: {0: " bad", 1: " good"}}\n'
        "data: {train: none.jsonl, dev: dev.jsonl}\n"
        "prompt: {length: 1, vocabulary: {kind: list, candidates: [a, b]}}\n"
    )
    backend = {"kind": "openai", "model": "m", "api_key_env": "OUR_KEY"}
    config = ServeConfig.model_validate(
        {"auth": {"enrolment_tokens": ["t" * 20]}, "backend": backend, "runs": ["runs/run.yaml"]}
    )
    ((run,), errors) = config.load_runs(tmp_path)
    assert not errors
    assert run.spec.backend == config.backend
    assert (run.spec.data, run.dev, run.unmeasured) == (None, ({"text": "fine", "label": 1},), None)
    # A stored run continues with another backend: its fingerprint identifies the model.
    assert run.spec.is_same_run(run.spec.model_copy(update={"backend": BackendSpec()}))
    task = run.spec.task.model_dump()
    swapped = run.spec.task.model_validate({**task, "labels": task["labels"][::-1]})
    other = run.spec.model_copy(update={"task": swapped})
    assert not run.spec.is_same_run(other)
    assert [*run.spec.differences(other)] == ["task.labels"]
