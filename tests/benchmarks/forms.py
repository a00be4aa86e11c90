"""Cost of the two encodings of messages with arrays: bytes per round, time to write and to read.

python tests/benchmarks/forms.py [--rounds 20]
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog

from fedone_sdk import Aggregator, RunSpec, Vocabulary
from fedone_sdk.budget import Usage
from fedone_sdk.client import HttpTransport
from fedone_sdk.messages import JSON, TENSORS, UPDATE, AlphaUpdate, Scored, decode, encode
from fedone_sdk.messages.ndarray import from_wire, to_wire
from fedone_sdk.testing import ScriptedBackend
from tests.edge import edge_client

NAMES = {JSON: "JSON", TENSORS: "tensors"}
SHAPES = {"GS-BDPL, n 20, N 200": (20, 200), "P-tuning v2, 24 layers, n 20, H 1024": (960, 1024)}


class JsonTransport(HttpTransport):
    """Requests and sends JSON."""

    async def _request(self, *call: Any, **options: Any) -> Any:
        return await super()._request(*call, **{**options, "accept": JSON})


async def bytes_per_round(form: str, rounds: int) -> float:
    """Return the bytes of a round's bodies over HTTP, without what a device fetches once."""
    spec = RunSpec.model_validate(
        {
            "name": "run",
            "task": {"template": "{prompt} {text} {mask}", "labels": {0: " no", 1: " yes"}},
            "prompt": {"length": 20, "vocabulary": {"kind": "list", "candidates": ["x", "y"]}},
            "method": {"name": "gs-bdpl", "num_samples": 2, "batch_size": 2, "optimizer": "sgd"},
            "participation": {"exchange": "alpha"},
            "rounds": rounds,
            "evaluation": {"every": 0},
        }
    )
    words = Vocabulary(candidates=tuple(f" word{n}" for n in range(200)))
    data = [{"text": f"text {n}", "label": n % 2} for n in range(4)]
    async with Aggregator(backend=ScriptedBackend(), enrolment_tokens=["token"]) as aggregator:
        url = await aggregator.listen()
        run = await aggregator.add_run(spec, words)
        transport = (HttpTransport if form == TENSORS else JsonTransport)(url)
        seen = []
        async with edge_client(url, token="token", data=data, transport=transport) as client:
            for _ in range(rounds):
                assert (await client.run_once()).outcome == "worked"
                traffic = run.result().communication
                seen.append(traffic.upload_bytes + traffic.download_bytes)
    return (seen[-1] - seen[0]) / (rounds - 1)


def best_ms(call: Callable[[], object], times: int = 15) -> float:
    """Return the least time of several runs, which has the least interference."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return 1000 * min(found)


def update_of(alpha: np.ndarray[Any, Any]) -> AlphaUpdate:
    """Return an update as a device builds it."""
    return AlphaUpdate(
        num_examples=32,
        scored=Scored(scored=32),
        usage=Usage(queries=20),
        model="roberta-mini@0123456789abcdef",
        alpha=to_wire(alpha),
        mean_loss=0.5,
    )


def main() -> None:
    """Measure and print Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    print(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}\n")
    print("| form | bytes of a round, alpha of 20 x 200 |\n|---|---|")
    for form, name in NAMES.items():
        print(f"| {name} | {asyncio.run(bytes_per_round(form, args.rounds)):,.0f} |")
    print("\n| update | elements | form | bytes | write ms | read ms |\n|---|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        alpha = np.random.default_rng(0).random(shape, dtype=np.float32) + np.float32(0.01)
        for form in NAMES:
            content_type, content = encode(update_of(alpha), form)
            assert content_type == form
            write = best_ms(lambda a=alpha, f=form: encode(update_of(a), f))
            read = best_ms(
                lambda c=content, f=form: from_wire(decode(UPDATE.validate_json, c, f).alpha)
            )
            size = f"{len(content):,}"
            print(
                f"| {name} | {alpha.size:,} | {NAMES[form]} | {size} | {write:.2f} | {read:.2f} |"
            )


if __name__ == "__main__":
    main()
