"""An ML engineer: the quickstart, an own table, a plan, a run, more budget, a report."""

from __future__ import annotations

import json
from pathlib import Path

from fedone_sdk.messages import RunResult
from fedone_sdk.spec import RunSpec
from tests.acceptance.first_hour.desk import plain, tickets_csv
from tests.acceptance.processes import Start


def test_the_quickstart_ends_with_a_verdict(start: Start, tmp_path: Path) -> None:
    run = start("quickstart", "--model", "mini", "--cap", 50, "--json", "result.json")
    assert run.ended() == 0, run.err
    verdict = json.loads((tmp_path / "result.json").read_text())["verdict"]["text"]
    assert f"verdict {verdict}\n" in plain(run.log)
    assert "over no prompt with bias (95 %" in verdict
    assert "for 50 queries" in verdict


def test_a_table_becomes_a_tuned_prompt(start: Start, tmp_path: Path) -> None:
    tickets_csv(tmp_path)
    init = start("init", "tickets.csv", "--model", "roberta-mini", "--queries", 12)
    assert init.ended() == 0, init.err
    assert "run.yaml: texts of 'text', labels of 'label'" in init.log
    assert "label words bad: ' bad', good: ' good'\n" in plain(init.log)
    assert "Next: fedone plan run.yaml, then fedone tune run.yaml" in init.log

    plan = start("plan", "run.yaml")
    assert plan.ended() == 0, plan.err
    assert "training queries 12 at most, cap 12 (6 per round)\n" in plain(plan.log)
    assert "cap suffices yes: pays about 2 of 2 rounds, 2 at worst\n" in plain(plan.log)

    tune = start("tune", "run.yaml", "--artefact", "prompt.json", "--json", "result.json")
    assert tune.ended() == 0, tune.err
    result = RunResult.model_validate_json((tmp_path / "result.json").read_bytes())
    verdict = result.verdict
    assert verdict is not None
    assert verdict.text in tune.log
    assert verdict.conclusion in ("worth_keeping", "unclear", "worse", "guessing")
    for baseline in (
        "One answer for everything",
        "No prompt",
        "No prompt, with its own label bias",
        "Untrained prompt",
        "Tuned prompt",
    ):
        assert f"  {baseline}  " in tune.log
    assert "USD 0.0000" in tune.log  # A model of this machine is known to cost nothing.
    assert "a higher cap lets the run continue: in the file, or by --raise UNIT=N\n" in tune.err
    artefact = json.loads((tmp_path / "prompt.json").read_text())
    assert artefact["evaluation"]["verdict"]["text"] == verdict.text

    # More budget: in the file, or by the option; what was paid for is not paid again.
    again = start("tune", "run.yaml", "--raise", "queries=24", "--json", "result.json")
    assert again.ended() == 0, again.err
    assert "raising queries 12 -> 24 after round 2\n" in again.err
    more = RunResult.model_validate_json((tmp_path / "result.json").read_bytes())
    assert (more.rounds, more.spent.queries) == (4, 24)
    assert more.history[:2] == result.history
    # No prompt and the untrained one were measured already.
    assert "continued after round 2; " in again.err
    measured = more.evaluation.queries - result.evaluation.queries
    assert 0 < measured <= result.evaluation.queries // 2

    spec = (tmp_path / "run.yaml").read_text()
    (tmp_path / "run.yaml").write_text(spec.replace("batch_size: 16", "batch_size: 8"))
    other = start("tune", "run.yaml")
    assert other.ended() == 2
    assert "changed: method.batch_size 16 -> 8, budget.queries 24 -> 12" in other.err
    assert "start over with --fresh, which keeps the answers" in other.err
    assert RunSpec.load(tmp_path / "run.yaml").name == "tickets"

    report = start("report", "tickets", "-o", "report.html")
    assert report.ended() == 0, report.err
    page = (tmp_path / "report.html").read_text()
    assert more.verdict is not None
    assert page.index("Was it worth it?") < page.index(more.verdict.text[1:]) < page.index("<table")
