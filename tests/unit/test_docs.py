"""The documentation is true: its files load, its programs run, its links work."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from fedone_sdk.aggregator.config import ServeConfig
from fedone_sdk.aggregator.http.guards import Limits
from fedone_sdk.aggregator.http.openapi import MAX_BODY_BYTES
from fedone_sdk.cli.app import app
from fedone_sdk.client.transport import _SCORE_S
from fedone_sdk.local import Federation
from fedone_sdk.spec import BackendSpec, MethodSpec, RunSpec, Spec, load_yaml, validate_spec
from fedone_sdk.task import TaskSpec
from tests.pages import blocks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
    *(p for p in sorted((ROOT / "examples").rglob("*.md")) if "node_modules" not in p.parts),
]

_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")
_CODES = re.compile(r"^```.*?^ *```$|^    .*?$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:^\s*|[`|;(]\s*|&& |[A-Z_]=\S* )fedone ((?:[^`|;&#>)]|\|(?=\w))*)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)

_COMMANDS: Any = get_command(app)


class _Backend(Spec):
    """A part of a RUN.yaml."""

    backend: BackendSpec


class _Task(Spec):
    """A part of a RUN.yaml."""

    task: TaskSpec


class _Method(Spec):
    """A part of a RUN.yaml."""

    method: MethodSpec


def _blocks(language: str) -> list[Any]:
    """The blocks without a title: tutorials follow those that have one."""
    return [
        pytest.param(block.text, id=f"{page.relative_to(ROOT)}:{block.line}")
        for page in PAGES
        for block in blocks(page.read_text(encoding="utf-8"))
        if block.language == language and not block.info
    ]


def _model_of(document: dict[str, Any]) -> type[Spec]:
    """What a block describes: by the keys that nothing else has."""
    if "prompt" in document:
        return RunSpec
    if "auth" in document:
        return ServeConfig
    if "method" in document:
        return _Method
    if "task" in document:
        return _Task
    return _Backend


@pytest.mark.parametrize("text", _blocks("yaml"))
def test_a_description_is_valid(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"\benv: (\w+)", text):
        monkeypatch.setenv(name, f"a-token-for-{name}")
    file = tmp_path / "file.yaml"
    file.write_text(text, encoding="utf-8")
    document = load_yaml(file)
    spec = validate_spec(_model_of(document), document, source="the page")
    if (
        isinstance(spec, RunSpec)
        and spec.data
        and spec.data.train
        and (ROOT / spec.data.train).exists()
    ):
        federation = Federation.load(spec, ROOT)  # Its template fits its data.
        assert federation.dev


@pytest.mark.parametrize("code", _blocks("python"))
def test_a_program_runs(code: str, tmp_path: Path) -> None:
    parts = ("async with EdgeClient", "async with AdminClient", "load_prompt(")
    if any(part in code for part in parts):
        # It is a part of something larger: its calls can be made, as far as they are ours.
        assert _check_calls(code) > 0
        return
    (tmp_path / "program.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-W", "error", "program.py"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def _check_calls(code: str) -> int:
    """Binds the arguments of each call of an imported name; how many there are."""
    compile(code, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    tree = ast.parse(code)
    names: dict[str, Any] = {}
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(body=[*imports], type_ignores=[]), "page", "exec"), names)
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            named = {word.arg: None for word in node.keywords if word.arg}
            inspect.signature(names[node.func.id]).bind(*node.args, **named)
            found += 1
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_installed_is_the_checkout(page: Path) -> None:
    """The package is not on PyPI; an error may name it, for where it is installed already."""
    for line in page.read_text(encoding="utf-8").splitlines():
        named = re.search(r"pip install [^`]*\bfedone-sdk\b", line)
        assert named is None or "needs an extra" in line, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_exist(page: Path) -> None:
    code = "\n".join(re.findall(_CODES, page.read_text(encoding="utf-8")))
    for line in re.sub(r"\\\n", " ", code).splitlines():
        for words in _COMMAND.findall(line):
            _check_command(words.split(), line)


def _check_command(words: list[str], line: str) -> None:
    """Walks down the command tree as far as the words lead."""
    command = _COMMANDS
    while words and words[0] in getattr(command, "commands", ()):
        command = command.commands[words.pop(0)]
    if hasattr(command, "commands") and words:
        assert words[0] in ("--help", "--version", "...", "…"), line
    options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert given <= options | {"--help"}, line


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


def test_the_architecture_names_modules_that_exist() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    package = ROOT / "fedone_sdk"
    for name in re.findall(r"`([\w/]+\.py)`", page):
        assert (package / name).is_file() or (package / "aggregator" / name).is_file(), name
    ways = page.partition("## Four ways through the server")[2].partition("\n## ")[0]
    shared, *each = re.split(r"^- ", ways.partition("\n\nOn the device")[0], flags=re.MULTILINE)
    assert len(each) == 4
    for way in each:
        found = set(re.findall(r"`((?!backends|algorithms)[\w/]+\.py)`", shared + way))
        assert len(found) <= 15 + 3, way  # Three of the shared ones are alternatives.


def test_the_readme_s_server_has_the_model_of_its_run(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for block in blocks((ROOT / "README.md").read_text(encoding="utf-8")):
        if block.language == "yaml":
            (tmp_path / "block.yaml").write_text(block.text, encoding="utf-8")
            document = load_yaml(tmp_path / "block.yaml")
            found["run" if "prompt" in document else "server"] = document
    assert found["server"]["backend"] == found["run"]["backend"]


def test_the_page_of_proxies_has_the_server_s_limits() -> None:
    page = (ROOT / "docs" / "operations" / "proxies.md").read_text(encoding="utf-8")
    ingress = (ROOT / "docs" / "guides" / "kubernetes.md").read_text(encoding="utf-8")
    mebibytes, keepalive_s = MAX_BODY_BYTES >> 20, Limits().keepalive_s
    assert f"up to {mebibytes} MiB" in page
    assert f"client_max_body_size {mebibytes}m" in page
    assert f"proxy-body-size: {mebibytes}m" in ingress
    assert f"`limits.keepalive_s`, {keepalive_s:.0f} s" in page
    assert f"up to {_SCORE_S:.0f} s" in page
    longest_s = 60 + _SCORE_S
    assert f"proxy_read_timeout {longest_s:.0f}s" in page
    assert f'proxy-read-timeout: "{longest_s:.0f}"' in ingress
