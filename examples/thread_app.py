"""A synchronous app with a client in a thread: `EdgeClientThread` has its own event loop.

python examples/thread_app.py http://127.0.0.1:8080 ENROLMENT_TOKEN rows.jsonl

Prints a line for each event of the client. Ends with the runs, or with Ctrl-C: work in
progress has five seconds to end, and otherwise continues at the next start.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedone_sdk.client import ClientEvent, EdgeClient, EdgeClientThread, Hooks


def show(event: ClientEvent) -> None:
    """Print an event, in the client's thread; an app would pass it to its user interface."""
    progress = f" {event.done}/{event.total}" if event.kind == "scored" else ""
    print(f"{event.kind}{progress}", flush=True)


def rows(file: Path) -> list[dict[str, Any]]:
    """Return the device's current rows; called in the client's thread."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def main(server: str, token: str, file: str) -> None:
    """Run the app: start the client, run its main loop, and stop the client."""
    client = EdgeClient(
        server,
        token=token,
        data=lambda: rows(Path(file)),
        state_dir="app-state",
        hooks=Hooks(on_event=show),
    )
    with EdgeClientThread(client, stop_timeout_s=5) as working, suppress(KeyboardInterrupt):
        while working.running:
            working.join(0.2)  # in place of the app's main loop
    if working.error is not None:
        sys.exit(str(working.error))


if __name__ == "__main__":
    main(*sys.argv[1:])
