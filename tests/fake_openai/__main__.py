"""The fake server in a separate process; it prints its URL, and ends at SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal

from tests.fake_openai.mails import Mails
from tests.fake_openai.script import BEHAVIOURS, Script
from tests.fake_openai.server import FakeOpenAI


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not LEFT=RIGHT")
    return name, value


async def _serve(arguments: argparse.Namespace) -> None:
    script = Script(
        {int(number): behaviour for number, behaviour in arguments.at},
        by_text=dict(arguments.text),
        chances={behaviour: float(chance) for behaviour, chance in arguments.chance},
        seed=arguments.seed,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = FakeOpenAI(
        script=script,
        models={arguments.model: {}},
        model=Mails() if arguments.mails else None,
        key=arguments.key,
        requests_per_minute=arguments.rpm,
        tokens_per_minute=arguments.tpm,
        latency_s=arguments.latency_s,
        log=arguments.log,
        port=arguments.port,
        **{name: json.loads(value) for name, value in arguments.set},
    )
    async with server:
        print(server.base_url, flush=True)
        await stop.wait()


def main() -> None:
    names = "\n".join(f"  {name}: {what}" for name, what in BEHAVIOURS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.fake_openai",
        description=__doc__,
        epilog=f"behaviours:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", help="one JSON line per billed request, before it is answered")
    parser.add_argument("--model", default="fake-1")
    parser.add_argument("--mails", action="store_true", help="answers from support mails")
    parser.add_argument("--key", help="the key that it wants")
    parser.add_argument("--at", type=_pair, action="append", default=[], metavar="NUMBER=BEHAVIOUR")
    parser.add_argument(
        "--chance", type=_pair, action="append", default=[], metavar="BEHAVIOUR=PROBABILITY"
    )
    parser.add_argument("--text", type=_pair, action="append", default=[], metavar="TEXT=BEHAVIOUR")
    parser.add_argument(
        "--set", type=_pair, action="append", default=[], metavar="ARGUMENT=JSON", help="FakeOpenAI"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rpm", type=int, help="its own limit, requests per minute")
    parser.add_argument("--tpm", type=int, help="its own limit, tokens per minute")
    parser.add_argument("--latency-s", type=float, default=0.0)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
