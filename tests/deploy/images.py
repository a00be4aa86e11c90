"""The commands of the container images, run without a container engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "deploy" / "containers"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a Containerfile, continued lines joined."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """The arguments, of either form."""
        if self.text.startswith("["):
            return list(json.loads(self.text))
        return self.text.split()

    @property
    def flags(self) -> list[str]:
        """``--from=build`` and the like."""
        return [word for word in self.words if word.startswith("--")]

    @property
    def paths(self) -> list[str]:
        """Arguments that are no flags."""
        return [word for word in self.words if not word.startswith("--")]


Stage = list[Instruction]


def stages(containerfile: Path) -> list[Stage]:
    """The stages of a Containerfile; what stands before the first is stage 0."""
    text = re.sub(r"^#.*\n", "", containerfile.read_text(), flags=re.MULTILINE)
    found: list[Stage] = [[]]
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        name, _, rest = line.partition(" ")
        if name == "FROM":
            found.append([])
        found[-1].append(Instruction(name, " ".join(rest.split())))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The last stage of an image that was built into a folder, which stands for ``/``."""

    folder: Path
    environment: Mapping[str, str]
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]

    def here(self, text: str) -> str:
        """A text of the image, with this machine's paths in place of the image's."""
        for path in ("/opt/fedone", "/usr/local/bin", "/var/lib/fedone"):
            text = text.replace(path, f"{self.folder}{path}")
        return text

    def run_environment(self, **more: str) -> dict[str, str]:
        """The variables of a container, and no others."""
        given = {name: self.here(value) for name, value in self.environment.items()}
        path = f"{given.pop('PATH')}:{self.folder}/usr/local/bin:/usr/bin:/bin"
        return given | {"PATH": path} | more

    def argv(self, *command: str) -> list[str]:
        """What a container would execute."""
        entrypoint, *rest = [self.here(word) for word in (*self.entrypoint, *command)]
        found = shutil.which(entrypoint, path=self.run_environment()["PATH"])
        assert found is not None, f"{entrypoint} is not in the image"
        return [found, *rest]


def build(name: str, folder: Path) -> Image:
    """Execute a Containerfile, instruction by instruction, below a folder."""
    _, first, last = stages(CONTAINERS / f"{name}.Containerfile")
    _build_stage(first, folder)
    environment: dict[str, str] = {"PATH": "/usr/bin:/bin"}
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    for step in last:
        if step.name == "COPY":
            _copy(step, folder)
        elif step.name == "RUN":
            # Ownership is the engine's: these tests may not run as root.
            text = re.sub(r"-[og] \d+ ", "", step.text)
            _run(_here(text, folder), folder, {})
        elif step.name == "ENV":
            environment |= _variables(step, environment)
        elif step.name == "ENTRYPOINT":
            entrypoint = tuple(step.words)
        elif step.name == "CMD":
            command = tuple(step.words)
    return Image(folder=folder, environment=environment, entrypoint=entrypoint, command=command)


def _build_stage(stage: Stage, folder: Path) -> None:
    source = folder / "src"
    source.mkdir(parents=True)
    variables: dict[str, str] = {}
    for step in stage:
        if step.name in ("ARG", "ENV"):
            variables |= _variables(step, variables)
        elif step.name == "COPY":
            *names, target = step.paths
            for name in names:
                if (ROOT / name).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
                    shutil.copytree(ROOT / name, source / target, ignore=ignored)
                else:
                    shutil.copy(ROOT / name, source / target)
        elif step.name == "RUN":
            _run(_here(step.text, folder), source, variables)


def _copy(step: Instruction, folder: Path) -> None:
    if any(flag.startswith("--from=") for flag in step.flags):
        return  # Both stages are one folder here.
    *names, target = step.paths
    (folder / target.strip("/")).mkdir(parents=True, exist_ok=True)
    for name in names:
        copied = Path(shutil.copy(ROOT / name, folder / target.strip("/")))
        copied.write_text(_here(copied.read_text(), folder))
        copied.chmod(0o755)


def _variables(step: Instruction, known: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name, value in re.findall(r"(\w+)=(\S+)", step.text):
        found[name] = re.sub(r"\$(\w+)", lambda match: known.get(match[1], ""), value)
    return found


def _here(text: str, folder: Path) -> str:
    for path in ("/opt/fedone", "/src", "/var/lib/fedone"):
        text = text.replace(path, f"{folder}{path}")
    return text


def _run(command: str, folder: Path, variables: Mapping[str, str]) -> None:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=folder,
        env=os.environ | variables | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="session")
def edge_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The edge client's image."""
    folder = tmp_path_factory.mktemp("edge")
    yield build("edge", folder)
    shutil.rmtree(folder)
