"""docs/tutorials/companion-app.md, with a lost connection and a killed app."""

from __future__ import annotations

from pathlib import Path

from fedone_sdk.budget import SqliteLedger
from tests.processes import free_port, until
from tests.tutorials.tutorial import Tutorial


def test_companion_app(tmp_path: Path) -> None:
    page = Tutorial("companion-app", tmp_path, changes={"8080": str(free_port())})
    page.skip("python3 -m venv")
    (page.root / "companion").mkdir()
    page.run()
    page.run()
    with page.start() as server:
        server.reaches('"event": "serving"')
        page.shown(server)
        page.run()

        with page.start() as app:
            app.reaches("paused \n")
            page.shown(app)
            page.run()  # plugged in
            app.reaches("round 1: ")
            page.shown(app)
            page.run()  # unplugged
            until(lambda: app.log.endswith("paused \n"), app)
            page.shown(app)
            assert (before := budget(page)) > 0
            assert app.ctrl_c() == 0
        spent = budget(page)  # with the queries of the step in which the app may have been paused
        assert before <= spent < before + 8

        output = page.run()  # to the end of the run
        assert "enrolled" not in output
        output = page.run()
        assert "completed" in (page.folder / "reviews.json").read_text()
        server_says, device_says = (int(line.split()[-1]) for line in output.splitlines()[-2:])
        assert server_says == device_says == budget(page) > spent
        page.run()
        assert server.ctrl_c() == 0
    assert page.rest == []
    secrets = (page.folder / "tokens.env").read_text().split("=")[1:]
    written = server.log + app.log + output
    assert not [secret for secret in secrets if secret.split("\n")[0] in written]


def budget(page: Tutorial) -> float:
    """What the device has counted on its disk."""
    ledger = SqliteLedger(page.folder / "app-state" / "budget.sqlite3")
    return ledger.account(None).spent.queries
