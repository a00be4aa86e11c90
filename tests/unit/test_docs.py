"""The documentation is true: its files load, its programs run, its links lead somewhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedone_sdk.aggregator.config import ServeConfig
from fedone_sdk.gateway import GatewayConfig
from fedone_sdk.simulation import Federation
from fedone_sdk.spec import BackendSpec, MethodSpec, RunSpec, Spec, load_yaml, validate_spec
from fedone_sdk.spec.run import GatewayPolicy

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


class _Backend(Spec):
    """A part of a RUN.yaml."""

    backend: BackendSpec


class _Gateway(Spec):
    """A part of a RUN.yaml."""

    gateway: GatewayPolicy


class _Method(Spec):
    """A part of a RUN.yaml."""

    method: MethodSpec


def _blocks(language: str) -> list[Any]:
    blocks = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in _FENCE.finditer(text):
            if found[1] == language:
                line = text.count("\n", 0, found.start()) + 1
                blocks.append(pytest.param(found[2], id=f"{page.relative_to(ROOT)}:{line}"))
    return blocks


def _model_of(document: dict[str, Any]) -> type[Spec]:
    """What a block describes: by the keys that nothing else has."""
    if "prompt" in document:
        return RunSpec
    if "tokens" in document:
        return GatewayConfig
    if "auth" in document:
        return ServeConfig
    if "method" in document:
        return _Method
    return _Gateway if "gateway" in document else _Backend


@pytest.mark.parametrize("text", _blocks("yaml"))
def test_a_description_is_valid(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"\benv: (\w+)", text):
        monkeypatch.setenv(name, f"a-token-for-{name}")
    file = tmp_path / "file.yaml"
    file.write_text(text, encoding="utf-8")
    document = load_yaml(file)
    spec = validate_spec(_model_of(document), document, source="the page")
    if isinstance(spec, RunSpec) and spec.data and (ROOT / spec.data.train).exists():
        federation = Federation.load(spec, ROOT)  # Its template fits its data.
        assert federation.dev


@pytest.mark.parametrize("code", _blocks("python"))
def test_a_program_runs(code: str, tmp_path: Path) -> None:
    if "async with EdgeClient" in code or "cassette.jsonl" in code:
        # It is a part of something larger.
        compile(code, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        return
    (tmp_path / "program.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-W", "error", "program.py"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), target
        if anchor:
            assert anchor in _anchors(found), target


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_every_backend_option_is_on_the_reference_page() -> None:
    page = (ROOT / "docs" / "reference" / "run-yaml.md").read_text(encoding="utf-8")
    documented = {"kind"}
    for text in _FENCE.findall(page):
        documented |= _keys(yaml.safe_load(text[1]))
    schema = _Backend.model_json_schema()["$defs"]
    options = {key for name in schema for key in schema[name].get("properties", {})}
    assert options - documented == set()
    run = {key for field in _run_models() for key in field}
    assert run - documented == set()


def _run_models() -> Iterator[set[str]]:
    yield set(RunSpec.model_fields)
    for name in ("task", "data", "participation", "evaluation", "gateway"):
        annotation = RunSpec.model_fields[name].annotation
        for model in (annotation, *getattr(annotation, "__args__", ())):
            if hasattr(model, "model_fields"):
                yield set(model.model_fields)


def _keys(document: object) -> set[str]:
    if not isinstance(document, dict):
        return set()
    return {str(key) for key in document}.union(*map(_keys, document.values()))
