"""The files that `fedone tune` keeps next to RUN.yaml, and its errors."""

from __future__ import annotations

import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.acceptance import tiny
from tests.acceptance.tiny import result_in, write_sentences
from tests.console import Fedone, Outcome, the_line

RUN = tiny.RUN.replace("dev: dev.jsonl, ", "").replace("evaluation: {every: 2}\n", "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_sentences(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tune(fedone: Fedone) -> Fedone:
    def run(*arguments: object) -> Outcome:
        return fedone("tune", "run.yaml", "--json", "r.json", *arguments)

    return run


def test_a_run_is_kept_next_to_its_file(tune: Fedone, folder: Path) -> None:
    code, _, err = tune()
    assert code == 0
    assert err.splitlines()[-1] == (
        "the run is in .fedone/tiny.db; for a report: fedone report tiny --store .fedone/tiny.db"
    )
    assert "for a report" not in tune("--report", "r.html").err
    kept = folder / ".fedone"
    assert (kept / ".gitignore").read_text() == "*\n"
    assert {file.name for file in kept.iterdir()} >= {"tiny.db", "tiny.clients", "answers.sqlite"}
    assert {file.name for file in folder.iterdir()} == {
        *("run.yaml", "train.jsonl", "dev.jsonl", "r.json", "r.html", ".fedone")
    }


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [(["--seed", 1], "seed 0 -> 1"), (["--cap", 8], "budget.queries 16 -> 8")],
)
def test_another_description_is_one_line_and_loses_nothing(
    tune: Fedone, folder: Path, arguments: list[object], changed: str
) -> None:
    tune()
    first = result_in("r.json")
    line = the_line(tune(*arguments))
    assert line.startswith("run.yaml: name: 'tiny' is taken by a different run")
    assert f"(changed: {changed}" in line
    assert "--fresh" in line
    code, out, err = tune()
    assert (code, "completed" in out) == (0, True)
    assert "the run had ended before (completed); --fresh starts over" in err
    again = result_in("r.json")
    assert (again.alpha_sha256, again.spent) == (first.alpha_sha256, first.spent)
    assert tune(*arguments, "--fresh").code == 0
    assert result_in("r.json").alpha_sha256 != first.alpha_sha256


@pytest.mark.parametrize("how", ["the file", "--raise"])
def test_a_raised_cap_lets_the_run_go_on(
    tune: Fedone, fedone: Fedone, folder: Path, how: str
) -> None:
    low, high = RUN.replace("queries: 16", "queries: 8"), RUN.replace("queries: 16", "queries: 12")
    Path("run.yaml").write_text(high.replace("name: tiny", "name: whole"))
    tune()
    whole = result_in("r.json")
    Path("run.yaml").write_text(low)
    assert tune("--fresh").code == 0
    result = result_in("r.json")
    assert (result.status, result.spent.queries) == ("budget_exhausted", 8)
    if how == "the file":
        Path("run.yaml").write_text(high)
    raised = ["--raise", "queries=12"] if how == "--raise" else []
    code, out, err = tune(*raised)
    assert code == 0
    assert "raising queries 8 -> 12 after round 2" in err
    # The run called "whole" has asked it all before.
    assert "continued after round 2; 16 answers came from the cache" in err
    assert "token" not in err
    assert "12 of 12" in out
    assert (result_in("r.json").cap.queries, result_in("r.json").spent.queries) == (12, 12)
    assert result_in("r.json").spent.requests == 0
    assert result_in("r.json").alpha_sha256 == whole.alpha_sha256
    # The same command again changes nothing, and a lower number is refused.
    assert "the run had ended before (budget_exhausted)" in tune(*raised).err
    Path("run.yaml").write_text(low)
    assert "budget.queries 12 -> 8; a cap can only be raised" in the_line(tune())


def test_a_finished_search_whose_cap_is_raised_goes_on(tune: Fedone, folder: Path) -> None:
    method = "method: {name: random, num_samples: 4, batch_size: 4, halving: 0.5}"
    search = RUN[: RUN.index("method:")] + method + "\nparticipation: {exchange: losses}\n"
    Path("run.yaml").write_text(f"{search}budget: {{queries: 24}}\nrounds: 40\n")
    tune()
    assert (result_in("r.json").status, result_in("r.json").rounds) == ("completed", 6)
    assert tune("--raise", "queries=48").code == 0
    assert result_in("r.json").status == "completed"
    assert result_in("r.json").rounds > 6


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("queries", "--raise: 'queries' must be UNIT=N, such as queries=600"),
        ("queries=9", "--raise: queries: the cap is 16, and a cap can only be raised"),
    ],
)
def test_a_cap_that_cannot_be_raised_is_one_line(
    tune: Fedone, folder: Path, given: str, said: str
) -> None:
    assert the_line(tune("--raise", given)).startswith(f"arguments: {said}")
    assert not (folder / ".fedone").exists()


def test_a_cap_that_pays_for_no_round_is_no_success(tune: Fedone, folder: Path) -> None:
    code, out, err = tune("--cap", 1)
    assert code == 1
    assert "budget_exhausted, 0 rounds" in out
    assert "no round was done, because the caps do not suffice for one" in err


def test_no_store_keeps_nothing(tune: Fedone, folder: Path) -> None:
    assert tune("--no-store").code == 0
    assert not (folder / ".fedone").exists()
    line = the_line(tune("--no-store", "--fresh"))
    assert line == "arguments: --fresh: cannot be combined with --no-store"


def test_fresh_removes_no_other_run(tune: Fedone, folder: Path) -> None:
    assert tune("--store", "run.db").code == 0
    Path("run.yaml").write_text(RUN.replace("name: tiny", "name: other"))
    rows = Path("train.jsonl").read_text()
    Path("train.jsonl").write_text(rows.replace("{", '{"more": 1, ', 1))
    assert tune("--store", "run.db").code == 0
    line = the_line(tune("--store", "run.db", "--fresh"))
    assert line.startswith("arguments: --fresh: run.db also has other runs (tiny)")
    for run, data in (Path("run.yaml").read_text(), Path("train.jsonl").read_text()), (RUN, rows):
        Path("run.yaml").write_text(run)
        Path("train.jsonl").write_text(data)
        assert "the run had ended before" in tune("--store", "run.db").err


def test_a_store_whose_file_is_gone_starts_over(tune: Fedone, folder: Path) -> None:
    tune()
    first = result_in("r.json")
    rows = Path("train.jsonl").read_text()
    Path("train.jsonl").write_text(rows.replace("{", '{"more": 1, ', 1))
    line = the_line(tune())
    assert line.startswith("run.yaml: data: the rows have changed since the run began; restore")
    for file in Path(".fedone").glob("tiny.db*"):
        file.unlink()
    assert tune().code == 0
    assert result_in("r.json").alpha_sha256 == first.alpha_sha256


def test_a_damaged_run_is_one_line(fedone: Fedone, tune: Fedone, folder: Path) -> None:
    tune()
    for document in "", "[]", "[" * 100_000:
        with closing(sqlite3.connect(".fedone/tiny.db")) as db, db:
            db.execute("UPDATE runs SET document = ?", (document,))
        for outcome in tune(), fedone("report", "tiny"):
            assert the_line(outcome).startswith("store: run 'tiny' is damaged, or from another ver")


async def test_two_processes_do_not_tune_one_run(folder: Path) -> None:
    from fedone_sdk.cli._run_file import RunFile, RunState
    from fedone_sdk.errors import StoreUnavailable
    from fedone_sdk.stores import SqlStore

    run = RunFile.load(folder / "run.yaml")
    state = RunState.of(run.path, "tiny")
    state.make()
    store = SqlStore.sqlite(state.store)
    await store.open()
    try:
        for fresh in False, True:
            with pytest.raises(StoreUnavailable, match="in use by another process"):
                await state.find(run.spec, (), fresh=fresh)
    finally:
        await store.close()


def test_other_commands_find_a_kept_run(fedone: Fedone, tune: Fedone, folder: Path) -> None:
    tune()
    assert fedone("report", "tiny", "-o", "tiny.html").code == 0
    assert "tiny" in (folder / "tiny.html").read_text()
    assert fedone("runs", "export", "tiny", "--as", "prompt").code == 0
    assert fedone("prompt", "use", "tiny.prompt.json").code == 0
    assert fedone("runs", "export", "nope").err == "arguments: give either --server or --store\n"


def test_the_place_is_the_folder_of_the_file(
    fedone: Fedone, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("with a blank")
    for name in "run.yaml", "train.jsonl":
        shutil.copy(folder / name, elsewhere / name)
    _, _, err = fedone("tune", elsewhere / "run.yaml")
    assert (elsewhere / ".fedone" / "tiny.db").is_file()
    assert not (folder / ".fedone").exists()
    command = err.splitlines()[-1].partition("a report: ")[2]
    assert re.fullmatch(r"fedone report tiny --store '.*'", command)
