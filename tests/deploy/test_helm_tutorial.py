"""docs/guides/kubernetes.md without a cluster: the rendered programs run, and a run ends."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import pages
from tests.deploy.helm_chart import CHART, Manifests, render
from tests.deploy.helm_pods import Kubelet, Pod
from tests.postgres import PASSWORD, Cluster
from tests.processes import Process, fetch, running, until

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
BLOCKS = pages.blocks(PAGE)
REVIEWS = ROOT / "fedone_sdk" / "assets" / "companion_feedback" / "train.jsonl"


def blocks(language: str) -> list[str]:
    return [block.text for block in BLOCKS if block.language == language]


def merged(below: Any, above: Any) -> Any:
    """As helm takes one `-f` after the other."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{name: merged(below.get(name), part) for name, part in above.items()}}


VALUES: dict[str, Any] = yaml.safe_load(blocks("yml")[0])


@pytest.mark.parametrize("number", range(len(blocks("yml"))))
def test_the_values_go_together(number: int) -> None:
    """Each block is an addition to the first."""
    manifests = render(merged(VALUES, yaml.safe_load(blocks("yml")[number])), namespace="fedone")
    assert manifests.get("Deployment", "fedone-aggregator")


def test_the_readmes_values_go_together() -> None:
    found = pages.blocks((CHART / "README.md").read_text())
    values = [yaml.safe_load(block.text) for block in found if block.language == "yml"]
    manifests = [render(each) for each in values]
    assert manifests[-1].get("Deployment", "fedone-vllm")


def test_the_secrets_of_the_page_are_those_that_pods_ask_for() -> None:
    given = set(re.findall(r"--from-literal=([\w-]+)=", PAGE))
    asked = {
        variable["valueFrom"]["secretKeyRef"]["key"]
        for _, container in render(VALUES).containers()
        for variable in container.get("env", ())
        if "valueFrom" in variable
    }
    assert asked == given


@pytest.fixture
def database(postgres: Cluster) -> Iterator[str]:
    """What the bundled PostgreSQL's pod would make of its variables."""
    (container,) = render(VALUES).pod("postgresql")["containers"]
    environment = {v["name"]: v.get("value") for v in container["env"]}
    assert environment["POSTGRES_USER"] == "fedone"
    name = environment["POSTGRES_DB"]
    postgres.execute(f"CREATE DATABASE {name}")
    yield f"host=127.0.0.1&port={postgres.port}"
    postgres.drop(name)


def ready(pod: Pod) -> bool:
    """The readiness probe, as the kubelet sends it."""
    container = pod.spec["containers"][0]
    probe = container["readinessProbe"]["httpGet"]
    (port,) = (p["containerPort"] for p in container["ports"] if p["name"] == probe["port"])
    return fetch(pod.url(port) + probe["path"]) is not None


def commands(start: str) -> list[str]:
    """The page's lines that start so."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith(start)]


def test_from_values_to_a_finished_run(tmp_path: Path, database: str) -> None:
    manifests: Manifests = render(VALUES, namespace="fedone")
    secret = {
        name: PASSWORD if name == "database-password" else secrets.token_urlsafe(32)
        for name in re.findall(r"--from-literal=([\w-]+)=", PAGE)
    }
    kubelet = Kubelet(
        manifests,
        tmp_path,
        secrets={"fedone": secret},
        services={"host=fedone-postgresql&port=5432": database},
    )
    person = {
        **kubelet.environment,
        "ENROLMENT_TOKEN": secret["enrolment-token"],
        "FEDONE_ADMIN_TOKEN": secret["admin-token"],
    }
    logs = [kubelet.run(kubelet.pod("migration", "migration"), "migration")]
    assert logs[0].startswith("created schema ")
    with ExitStack() as stack:
        first = kubelet.pod("aggregator", "aggregator-0", "fedone-aggregator")
        second = kubelet.pod("aggregator", "aggregator-1")
        serving = [
            stack.enter_context(kubelet.container(pod, "aggregator")) for pod in (first, second)
        ]
        for pod, process in zip((first, second), serving, strict=True):
            until(lambda pod=pod: ready(pod), process)

        test = kubelet.pod("test", "test")
        assert kubelet.run(test, "answers").count("200 http://") == 2
        assert "reviews" in kubelet.run(test, "runs")

        devices = [
            stack.enter_context(device(tmp_path / f"device-of-{pod.folder.name}", pod, person))
            for pod in (first, second)
        ]
        for client in devices:
            assert client.popen.wait(120) == 0, client.log

        result = look(second, tmp_path, person)
        assert (result["status"], result["rounds"]) == ("completed", 20)
        assert 0 < result["spent"]["queries"] <= result["cap"]["queries"] == 200
        # Perhaps no prompt: of two devices, nothing else may be better for sure.
        assert result["prompt"]["text"] == "".join(result["prompt"]["tokens"])
        for pod in (first, second):
            figures = fetch(pod.url(9090) + "/metrics")
            assert figures is not None
            assert b'fedone_run_rounds_total{run="reviews"} 20.0' in figures

        again = kubelet.run(kubelet.pod("migration", "upgrade"), "migration")
        assert again.endswith("the store has the newest schema, 0001\n")
        logs += [again, *(process.log for process in serving)]
    for text in secret.values():
        assert text not in "".join(logs)


@contextmanager
def device(folder: Path, pod: Pod, environment: dict[str, str]) -> Iterator[Process]:
    """The page's own command, on some of the sentences."""
    folder.mkdir()
    rows = REVIEWS.read_text().splitlines(keepends=True)
    (folder / "reviews.jsonl").write_text("".join(rows[:40]))
    (command,) = commands("FEDONE_TOKEN=$ENROLMENT_TOKEN fedone client ")
    with running(["sh", "-c", at(command, pod)], environment, folder, "log") as process:
        yield process


def look(pod: Pod, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """The page's own commands; what the last one wrote."""
    for command in commands("fedone runs "):
        subprocess.run(
            ["sh", "-c", at(command, pod)],
            cwd=folder,
            env=environment,
            check=True,
            capture_output=True,
        )
    found: dict[str, Any] = json.loads((folder / "reviews.json").read_text())
    return found


def at(command: str, pod: Pod) -> str:
    """A command, with the address that `kubectl port-forward` would make."""
    assert "http://127.0.0.1:8080" in command
    return command.replace("http://127.0.0.1:8080", pod.url(8080))
