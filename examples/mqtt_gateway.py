"""An IoT gateway: many MQTT sensors, and one `EdgeClient` for all of them.

pip install aiomqtt
FEDONE_TOKEN=... python examples/mqtt_gateway.py http://127.0.0.1:8080 --broker 127.0.0.1:1883

Sensors publish {"text": ..., "label": 0 or 1} to sensors/NAME/feedback. Only the latest rows of a
sensor are kept, so that a busy sensor does not dominate the data. The program prints connections to
the broker, lost connections, sensors and the client's events. It exits when the runs have ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections import deque
from typing import Any

import aiomqtt

from fedone_sdk import EdgeClient
from fedone_sdk.client import ClientEvent, Hooks

TOPIC = "sensors/+/feedback"
ROWS_PER_SENSOR = 50
RECONNECT_S = 1.0


class Sensors:
    """The sensors' latest rows."""

    def __init__(self) -> None:
        self.rows: dict[str, deque[dict[str, Any]]] = {}
        self.joined = asyncio.Event()

    def add(self, name: str, payload: object) -> None:
        """Add a message; ignore messages that are not rows."""
        try:
            row = json.loads(str(payload, "utf-8") if isinstance(payload, bytes) else "null")
            row = {"text": str(row["text"]), "label": int(row["label"])}
        except (ValueError, TypeError, KeyError):
            return
        if name not in self.rows:
            self.rows[name] = deque(maxlen=ROWS_PER_SENSOR)
            print(f"sensor {name}", flush=True)
            self.joined.set()
        self.rows[name].append(row)

    async def wait_for(self, number: int) -> None:
        """Wait until this number of sensors has sent a row."""
        while len(self.rows) < number:
            self.joined.clear()
            await self.joined.wait()

    def held(self) -> list[dict[str, Any]]:
        """Return all current rows, without the sensors' names."""
        return [row for rows in self.rows.values() for row in rows]


async def listen(host: str, port: int, sensors: Sensors) -> None:
    """Receive the sensors' messages; the broker queues them during a disconnection."""
    while True:
        try:
            async with aiomqtt.Client(
                host, port, identifier="fedone-gateway", clean_session=False
            ) as broker:
                await broker.subscribe(TOPIC, qos=1)
                print("listening", flush=True)
                async for message in broker.messages:
                    sensors.add(message.topic.value.split("/")[1], message.payload)
        except aiomqtt.MqttError as exc:
            print(f"no broker: {exc}", flush=True)
            await asyncio.sleep(RECONNECT_S)


def show(event: ClientEvent) -> None:
    """Print an event of the client."""
    print(event.kind, flush=True)


async def bridge(server: str, token: str, host: str, port: int, sensors_wanted: int) -> None:
    """Work until the runs have ended."""
    sensors = Sensors()
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(listen(host, port, sensors))
        await sensors.wait_for(sensors_wanted)
        async with EdgeClient(
            server,
            token=token,
            data=sensors.held,
            state_dir="gateway-state",
            hooks=Hooks(on_event=show),
        ) as client:
            await client.run_forever()
        listening.cancel()


def main() -> None:
    """Read the arguments, and run the gateway."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", help="base URL of the aggregator")
    parser.add_argument("--broker", default="127.0.0.1:1883", help="HOST:PORT of the MQTT broker")
    parser.add_argument("--sensors", type=int, default=1, help="wait for rows of this many sensors")
    arguments = parser.parse_args()
    host, _, port = arguments.broker.rpartition(":")
    asyncio.run(
        bridge(arguments.server, os.environ["FEDONE_TOKEN"], host, int(port), arguments.sensors)
    )


if __name__ == "__main__":
    main()
