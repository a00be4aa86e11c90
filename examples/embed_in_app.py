"""A plain synchronous app with an edge client beside it, which works while the device charges.

python examples/embed_in_app.py http://127.0.0.1:8080 ENROLMENT_TOKEN rows.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fedone_sdk.client import ClientEvent, EdgeClient, EdgeClientThread

POWER = Path("/sys/class/power_supply/AC/online")
"""Where Linux says whether the device is plugged in; a device without it has no battery."""


def plugged_in() -> bool:
    """Asked before the device takes work, and between its requests."""
    return not POWER.exists() or POWER.read_text().strip() == "1"


def show(event: ClientEvent) -> None:
    """Called in the client's thread; a real app would hand it to its user interface."""
    progress = f" {event.done}/{event.total}" if event.kind == "scored" else ""
    print(f"{event.kind}{progress}", flush=True)


def rows(file: Path) -> list[dict[str, Any]]:
    """What the device holds at the moment."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def main(server: str, token: str, file: str) -> None:
    """The app: it starts the client, goes about its own business, and ends it."""
    client = EdgeClient(
        server,
        token=token,
        data=lambda: rows(Path(file)),
        only_when=plugged_in,
        on_event=show,
        state_dir="app-state",
    )
    with EdgeClientThread(client, stop_timeout_s=5) as working:
        while working.running:
            working.join(0.2)  # the app's own main loop stands here
    if working.error is not None:
        sys.exit(str(working.error))


if __name__ == "__main__":
    main(*sys.argv[1:])
