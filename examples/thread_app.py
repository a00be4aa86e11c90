"""A synchronous app with a client in a thread that has its own event loop.

FEDONE_TOKEN=... python examples/thread_app.py http://127.0.0.1:8080 rows.jsonl

The program prints each event of the client, and exits when the runs have ended. At Ctrl-C, work in
progress has five seconds to finish; otherwise it continues at the next start.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedone_sdk.client import ClientEvent, EdgeClient, Hooks
from fedone_sdk.errors import FedOneError


def show(event: ClientEvent) -> None:
    """Print an event, in the client's thread; an app would pass it to its user interface."""
    progress = f" {event.done}/{event.total}" if event.kind == "scored" else ""
    print(f"{event.kind}{progress}", flush=True)


def rows(file: Path) -> list[dict[str, Any]]:
    """Return the device's current rows; called in the client's thread."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


async def work(client: EdgeClient) -> None:
    """Work in the client's thread until the runs end, or `client.stop` is called."""
    try:
        async with client:
            await client.run_forever()
    except FedOneError as exc:
        print(f"cannot work: {exc}", file=sys.stderr)


def main(server: str, file: str) -> None:
    """Run the app: start the client, run its main loop, and stop the client."""
    client = EdgeClient(
        server,
        token=os.environ["FEDONE_TOKEN"],
        data=lambda: rows(Path(file)),
        state_dir="app-state",
        hooks=Hooks(on_event=show),
    )
    thread = threading.Thread(target=lambda: asyncio.run(work(client)), daemon=True)
    thread.start()
    with suppress(KeyboardInterrupt):
        while thread.is_alive():
            time.sleep(0.2)  # in place of the app's main loop
    client.stop()  # from any thread
    thread.join(5)


if __name__ == "__main__":
    main(*sys.argv[1:])
