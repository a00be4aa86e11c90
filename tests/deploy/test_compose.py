"""The compose file: its settings, and its services as processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.images import CONTAINERS, Image
from tests.postgres import PASSWORD, Cluster
from tests.processes import Process, fetch, free_port, running, tool, until

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy" / "compose"
DOCUMENT: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
SERVICES: dict[str, Any] = DOCUMENT["services"]
# The image of PostgreSQL begins as root, to make its folder its own.
HARDENED = sorted(SERVICES.keys() - {"postgres"})


def test_the_file_follows_the_compose_specification() -> None:
    tool = Path(sys.executable).with_name("check-jsonschema")
    command = [tool, "--builtin-schema", "vendor.compose-spec", COMPOSE / "compose.yaml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_name_is_one_that_is_there() -> None:
    for name, service in SERVICES.items():
        for key, known in ("networks", DOCUMENT["networks"]), ("depends_on", SERVICES):
            assert set(service.get(key, ())) <= set(known), f"{name}.{key}"
        assert {_source(secret) for secret in service.get("secrets", ())} <= set(
            DOCUMENT["secrets"]
        )
        for source, _ in _mounts(service):
            here = source.startswith(".")
            assert (COMPOSE / source).exists() if here else source in DOCUMENT["volumes"], source


def _source(secret: str | dict[str, str]) -> str:
    return secret if isinstance(secret, str) else secret["source"]


def _mounts(service: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for volume in service.get("volumes", ()):
        source, colon, target = volume.partition(":")
        if colon:
            yield source, target.removesuffix(":ro")


@pytest.mark.parametrize("name", HARDENED)
def test_a_service_may_do_little(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "privileged" not in service
    assert "user" not in service  # The images say who they are.


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_has_a_limit_and_keeps_to_itself(name: str) -> None:
    service = SERVICES[name]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    if not service["image"].startswith("${FEDONE"):
        assert re.search(r":-docker\.io/\S+:[\w.-]+\}$", service["image"])


def test_only_the_aggregator_has_the_key_and_the_database() -> None:
    with_key = [
        name
        for name, service in SERVICES.items()
        if "openai_api_key" in map(_source, service.get("secrets", ()))
    ]
    assert with_key == ["aggregator"]
    assert DOCUMENT["networks"]["database"] == {"internal": True}
    members = {
        network: {name for name, service in SERVICES.items() if network in service["networks"]}
        for network in DOCUMENT["networks"]
    }
    assert members["database"] == {"aggregator", "postgres"}
    assert members["metrics"] == {"aggregator", "grafana", "prometheus"}
    # With two networks in common, each replica would be found at two addresses.
    shared = set(SERVICES["prometheus"]["networks"]) & set(SERVICES["aggregator"]["networks"])
    assert shared == {"metrics"}


def test_no_secret_stands_in_it() -> None:
    for name, service in SERVICES.items():
        for variable, value in (service.get("environment") or {}).items():
            secret = re.search("PASSWORD|TOKEN|KEY|SECRET", variable)
            assert not secret or value.startswith("/run/secrets/"), f"{name}: {variable}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of deploy/compose with secrets in it."""
    ignored = shutil.ignore_patterns("secrets")
    copy = Path(shutil.copytree(COMPOSE, tmp_path / "compose", ignore=ignored))
    subprocess.run([copy / "make-secrets"], check=True)
    return copy


def test_secrets_are_made_once(folder: Path) -> None:
    secrets = folder / "secrets"
    made = {path.name: path.read_text() for path in secrets.iterdir()}
    assert made.keys() == DOCUMENT["secrets"].keys()
    assert made.pop("openai_api_key") == ""
    assert len(set(made.values())) == len(made)
    assert all(re.fullmatch(r"[\w-]{43}", secret) for secret in made.values())
    assert secrets.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in secrets.iterdir()} == {0o644}
    subprocess.run([folder / "make-secrets"], check=True)
    assert made.items() <= {path.name: path.read_text() for path in secrets.iterdir()}.items()


def test_prometheus_takes_its_config_and_the_rules() -> None:
    promtool = tool("promtool", "apt-get install prometheus")
    rules = ROOT / "deploy/helm/fedone/files/alerts.yaml"
    for command in (
        ["check", "config", "--syntax-only", COMPOSE / "prometheus.yml"],
        ["check", "rules", rules],
    ):
        done = subprocess.run([promtool, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_gets_a_dashboard_with_the_datasource_that_it_has() -> None:
    datasource = yaml.safe_load((COMPOSE / "grafana/datasource.yaml").read_text())
    (given,) = datasource["datasources"]
    port = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"][0]
    assert given["url"] == "http://prometheus:9090"
    assert port["dns_sd_configs"][0]["names"] == ["aggregator"]
    provider = yaml.safe_load((COMPOSE / "grafana/dashboards.yaml").read_text())
    (place,) = [
        target for _, target in _mounts(SERVICES["grafana"]) if target.endswith("fedone.json")
    ]
    assert str(Path(place).parent) == provider["providers"][0]["options"]["path"]
    dashboard = json.loads((ROOT / "deploy/helm/fedone/files/dashboard.json").read_text())
    assert dashboard["panels"]


# The services as processes


class Stack:
    """The services of compose.yaml on this machine, at ports of their own."""

    def __init__(self, folder: Path, postgres: Cluster, database: str) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in ("aggregator", "metrics")}
        self.url = f"http://127.0.0.1:{self.ports['aggregator']}"
        self._database = f"postgresql://fedone@127.0.0.1:{postgres.port}/{database}"
        (folder / "secrets/database_password").chmod(0o600)
        (folder / "secrets/database_password").write_text(PASSWORD)

    def secret(self, name: str) -> str:
        return (self.folder / "secrets" / name).read_text()

    def environment(self, service: str) -> dict[str, str]:
        """What the service's container has: its secrets as files, under their names there."""
        secrets = self.folder / f"secrets-of-{service}"
        secrets.mkdir(exist_ok=True)
        for secret in SERVICES[service]["secrets"]:
            link = secrets / secret["target"]
            if not link.is_symlink():  # Another edge client may be reading it.
                link.symlink_to(self.folder / "secrets" / secret["source"])
        environment = {
            "PATH": f"{CONTAINERS}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SECRETS_DIR": str(secrets),
        }
        if service == "aggregator":
            environment |= {
                "FEDONE_LISTEN": f"127.0.0.1:{self.ports['aggregator']}",
                "FEDONE_METRICS__LISTEN": f"127.0.0.1:{self.ports['metrics']}",
                "FEDONE_STORE__URL": self._database,
            }
        return environment

    def argv(self, service: str) -> list[str]:
        """Its entrypoint and command, with the files where they are here."""
        command = [
            word.replace("/etc/fedone", str(self.folder)) for word in SERVICES[service]["command"]
        ]
        # `fedone` is the same program as a module, whichever environment the tests run in.
        return ["with-secrets", sys.executable, "-m", "fedone_sdk.cli", *command]

    def running(self, service: str) -> AbstractContextManager[Process]:
        return running(self.argv(service), self.environment(service), self.folder, service)

    def healthy(self, service: str) -> bool:
        port = self.ports[service]
        environment = {"HEALTH_URL": f"http://127.0.0.1:{port}/readyz"}
        command = [sys.executable, CONTAINERS / "healthy"]
        return subprocess.run(command, env=environment, stderr=subprocess.DEVNULL).returncode == 0


@pytest.fixture
def stack(folder: Path, postgres: Cluster, database: str) -> Stack:
    return Stack(folder, postgres, database)


@pytest.fixture
def aggregator(stack: Stack) -> Iterator[Process]:
    with stack.running("aggregator") as process:
        until(lambda: stack.healthy("aggregator"), process)
        yield process


def test_the_stack_tunes_a_prompt(stack: Stack, aggregator: Process, edge_image: Image) -> None:
    with _edge(stack, edge_image, 0) as first, _edge(stack, edge_image, 1) as second:
        for edge in first, second:
            assert edge.popen.wait(120) == 0, edge.log
    body = fetch(f"{stack.url}/v1/runs/feedback", token=stack.secret("admin_token"))
    assert body is not None
    run = json.loads(body)
    assert run["status"] in ("completed", "budget_exhausted")
    assert 0 < run["spent"]["queries"] <= 200
    assert {name for line in run["history"] for name in line["client_id"].split(",")}
    figures = fetch(f"http://127.0.0.1:{stack.ports['metrics']}/metrics")
    assert figures is not None
    assert b'fedone_run_spent_total{run="feedback",unit="queries"}' in figures
    assert aggregator.stop() == 0
    for name in "admin_token", "database_password", "enrolment_token":
        assert stack.secret(name) not in aggregator.log


def _edge(stack: Stack, image: Image, number: int) -> AbstractContextManager[Process]:
    state = f"{stack.folder}/edge-{number}"
    command = [
        word.replace("http://aggregator:8080", stack.url).replace(
            "/data/examples.jsonl", _examples(stack)
        )
        for word in SERVICES["edge"]["command"]
    ]
    argv = [*image.argv(*command), "--state", state]
    secrets = stack.environment("edge")["SECRETS_DIR"]
    environment = image.run_environment(SECRETS_DIR=secrets)
    return running(argv, environment, stack.folder, f"edge-{number}")


def _examples(stack: Stack) -> str:
    (source,) = [
        source for source, target in _mounts(SERVICES["edge"]) if target == "/data/examples.jsonl"
    ]
    return str((COMPOSE / source).resolve())


def test_an_error_for_a_wrong_password_does_not_contain_it(stack: Stack) -> None:
    wrong = "a-wrong-password-of-this-test"
    (stack.folder / "secrets/database_password").write_text(wrong)
    with stack.running("aggregator") as aggregator:
        assert aggregator.popen.wait(60) != 0
        assert "password authentication failed" in aggregator.log
        assert wrong not in aggregator.log
        assert "Traceback" not in aggregator.log
