"""A companion app that works only while the device charges and uses Wi-Fi.

pip install toga          # and toga-textual for a window in the terminal, without a desktop
FEDONE_TOKEN=... python examples/companion_app/app.py http://127.0.0.1:8080 rows.jsonl

The window has a switch. It shows why the device does not take part, or the client's last event,
and the number of accepted updates. BeeWare's `briefcase` packages the app for phones. The client
runs in a thread, so that its disk and network do not block the window.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import toga
from conditions import Conditions

from fedone_sdk.client import ClientEvent, EdgeClient, Hooks


def rows(file: Path) -> list[dict[str, Any]]:
    """Return the app's current rows."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


class Companion(toga.App):
    """The window, and the client behind it."""

    def __init__(self, server: str, token: str, file: Path, conditions: Conditions) -> None:
        self.conditions = conditions
        self.did, self.updates = "starting", 0
        self.client = EdgeClient(
            server,
            token=token,
            data=lambda: rows(file),
            state_dir=file.with_name("app-state"),
            hooks=Hooks(
                only_when=conditions.hold,
                # Called in the client's thread; only the app's thread may change widgets.
                on_event=lambda event: self.loop.call_soon_threadsafe(self.show, event),
            ),
        )
        self.thread = threading.Thread(target=lambda: asyncio.run(self.work()), daemon=True)
        super().__init__("Companion", "org.example.companion", on_exit=self.leave)

    def startup(self) -> None:
        """Build the window."""
        switch = toga.Switch("Help to improve answers", value=True, on_change=self.switched)
        self.status, self.count = toga.Label("Starting"), toga.Label("Updates: 0")
        self.main_window = window = toga.MainWindow(title="Companion")
        window.content = toga.Box(children=[switch, self.status, self.count], direction="column")
        window.show()
        self.thread.start()

    async def work(self) -> None:
        """Run the client, in its thread, until the app stops it."""
        async with self.client:
            await self.client.run_forever()

    def switched(self, switch: toga.Switch, **_: Any) -> None:
        """Set the user's switch, which the client reads before its next request."""
        self.conditions.wanted = switch.value
        self.refresh()

    def show(self, event: ClientEvent) -> None:
        """Record an event of the client."""
        self.did = event.kind
        self.updates += event.kind == "updated"
        self.refresh()

    def refresh(self) -> None:
        """Show the client's state, or why it is paused."""
        why = ", ".join(self.conditions.missing())
        self.status.text = f"Paused: {why}" if why else self.did.capitalize()
        self.count.text = f"Updates: {self.updates}"

    def on_running(self) -> None:
        """Start to refresh every second."""
        self.tick()

    def tick(self) -> None:
        """Refresh the conditions, which change without an event of the client."""
        self.refresh()
        self.loop.call_later(1, self.tick)

    def leave(self, app: toga.App, **_: Any) -> bool:
        """Stop the client; unfinished work continues at the next start."""
        self.client.stop()
        self.thread.join(5)
        return True


def main() -> None:
    """Read the arguments, and run the app."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", help="base URL of the aggregator")
    parser.add_argument("file", type=Path, help="rows of this device, JSON lines")
    parser.add_argument("--system", type=Path, default="/sys", help="where Linux describes devices")
    arguments = parser.parse_args()
    conditions = Conditions(arguments.system)
    Companion(arguments.server, os.environ["FEDONE_TOKEN"], arguments.file, conditions).main_loop()


if __name__ == "__main__":
    main()
