"""A web app with its users' data: an `EdgeClient` in aiohttp's event loop.

FEDONE_TOKEN=... python examples/aiohttp_app.py http://127.0.0.1:8080 rows.jsonl [PORT]

`POST /feedback` adds a row to the file, and the next assignment can use it. `GET /federation`
returns the client's last event. The program prints the app's address (port 8000 by default) and
each accepted update. Ctrl-C stops the app and the client.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from fedone_sdk import EdgeClient, FedOneError
from fedone_sdk.client import ClientEvent, Hooks

FILE = web.AppKey("file", Path)
LAST = web.AppKey("last", dict[str, Any])


async def take_feedback(request: web.Request) -> web.Response:
    """Store a user's feedback."""
    try:
        said = await request.json()
        row = {"text": str(said["text"]), "label": (0, 1).index(said["label"])}
    except (KeyError, TypeError, ValueError):
        raise web.HTTPUnprocessableEntity(text="needs a text, and 0 or 1 as its label\n") from None
    with request.app[FILE].open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return web.Response(status=201)


async def federation(request: web.Request) -> web.Response:
    """Return the client's last event."""
    return web.json_response(request.app[LAST])


def rows(file: Path) -> list[dict[str, Any]]:
    """Return the app's current rows, read before each assignment."""
    if not file.exists():
        return []  # no feedback yet: the client waits
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def build_app(server: str, token: str, file: Path) -> web.Application:
    """Return the app; its client starts and stops with it."""
    app = web.Application()
    app[FILE], app[LAST] = file, {}

    def note(event: ClientEvent) -> None:
        app[LAST].update(event=event.kind, round=event.round)
        if event.kind == "updated":
            print(f"round {event.round} updated", flush=True)

    async def take_part(client: EdgeClient) -> None:
        try:
            await client.run_forever()
        except FedOneError as exc:  # an invalid token, for example
            print(f"not taking part: {exc}", file=sys.stderr, flush=True)

    async def federated(app: web.Application) -> AsyncIterator[None]:
        async with EdgeClient(
            server,
            token=token,
            data=lambda: rows(file),
            state_dir="app-state",
            hooks=Hooks(on_event=note),
        ) as client:
            working = asyncio.create_task(take_part(client), name="edge client")
            yield
            client.stop()  # completes the current work, within the timeout
            with suppress(TimeoutError):
                await asyncio.wait_for(working, timeout=5)

    app.cleanup_ctx.append(federated)
    app.router.add_post("/feedback", take_feedback)
    app.router.add_get("/federation", federation)
    return app


def main(server: str, file: str, port: str = "8000") -> None:
    """Serve on loopback."""
    app = build_app(server, os.environ["FEDONE_TOKEN"], Path(file))
    web.run_app(app, host="127.0.0.1", port=int(port))


if __name__ == "__main__":
    main(*sys.argv[1:])
