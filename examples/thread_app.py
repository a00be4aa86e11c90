"""A plain synchronous app takes part by a thread: `EdgeClientThread` has an event loop of its own.

python examples/thread_app.py http://127.0.0.1:8080 ENROLMENT_TOKEN rows.jsonl

Prints a line for each event of the client. Ends with the runs, or with Ctrl-C; work under way may
then take five seconds more, and what is not done by that time goes on at the next start.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedone_sdk.client import ClientEvent, EdgeClient, EdgeClientThread, Hooks


def show(event: ClientEvent) -> None:
    """Called in the client's thread; a real app would hand it to its user interface."""
    progress = f" {event.done}/{event.total}" if event.kind == "scored" else ""
    print(f"{event.kind}{progress}", flush=True)


def rows(file: Path) -> list[dict[str, Any]]:
    """What the device holds at the moment; called in the client's thread too."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def main(server: str, token: str, file: str) -> None:
    """The app: it starts the client, goes about its own business, and ends it."""
    client = EdgeClient(
        server,
        token=token,
        data=lambda: rows(Path(file)),
        state_dir="app-state",
        hooks=Hooks(on_event=show),
    )
    with EdgeClientThread(client, stop_timeout_s=5) as working, suppress(KeyboardInterrupt):
        while working.running:
            working.join(0.2)  # the app's own main loop stands here
    if working.error is not None:
        sys.exit(str(working.error))


if __name__ == "__main__":
    main(*sys.argv[1:])
