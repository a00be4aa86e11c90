"""Reflection, `scores` and candidates only, in a world whose rules an instruction must name.

    python -m tests.benchmarks.reflection --seeds 5

Server, devices and messages are real; the models are scripted. The label of a text follows from its
topic by a hidden rule; the model is sure of it if the instruction names the rule, and knows nothing
otherwise. A reflector that sees failed rows names the rules of up to two topics, and errs with a
given rate. The proposer by scores sees no row: it knows the topics and guesses their labels.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from decimal import Decimal
from statistics import mean, median
from typing import Any

import structlog

from fedone_sdk.aggregator import ServedRun
from fedone_sdk.aggregator.runs.changes import Change
from fedone_sdk.backends import Answer, Query
from fedone_sdk.budget import Usage
from fedone_sdk.messages import Proposal
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import Rendered
from fedone_sdk.testing import ScriptedBackend
from tests.runs import RecordingTransport, memory_client, serving

TOPICS = ("refund", "invoice", "parcel", "password", "contract", "delivery")
LABELS = ("calm", "urgent")
NAMES = ("Miriam", "Oskar", "Jana", "Tariq", "Ines", "Pavel", "Leila", "Bruno")
CLIENTS, ROWS, GOAL, QUERIES = 8, 48, 0.9, 600

Write = Callable[[Rendered, int], str]


@dataclass(frozen=True, kw_only=True)
class World:
    """Hidden rules, and who holds texts of which topics.

    Attributes:
        clustered: Whether the clients are in two groups, each with half of the topics.
        liars: Number of clients that invert their losses and propose wrong rules.
    """

    seed: int
    clustered: bool = False
    liars: int = 0

    @property
    def rules(self) -> Mapping[str, str]:
        """The label of each topic, each label for half of them."""
        labels = [LABELS[number % 2] for number in range(len(TOPICS))]
        random.Random(self.seed).shuffle(labels)
        return dict(zip(TOPICS, labels, strict=True))

    def rows(self, client: int) -> list[dict[str, str]]:
        """Return a client's rows, each with a name, a number and a phrase that no other has."""
        half = len(TOPICS) // 2
        topics = TOPICS[client % 2 * half :][:half] if self.clustered else TOPICS
        rng = random.Random(f"{self.seed} {client}")
        rows = []
        for number in range(ROWS):
            topic = topics[number % len(topics)]
            private = f"{NAMES[client]}{'abcdefgh'[rng.randrange(8)]} no {rng.randrange(10**6)}"
            text = f"again {private} has written to us about the {topic} of last week"
            rows.append({"text": text, "label": self.rules[topic]})
        return rows

    def answer(self, inputs: Rendered, words: Sequence[str]) -> tuple[float, ...]:
        """Return the model's log-probabilities of the two labels."""
        instruction, _, text = text_of(inputs).partition("\n")
        (topic,) = re.findall(r"about the (\w+) of", text)
        named = re.findall(rf"{topic} is (\w+)", instruction)
        share = 0.45 + 0.1 * (zlib.crc32(text.encode()) % 1000) / 1000
        if named:
            share = 0.95 if named[-1] == LABELS[1] else 0.05
        return math.log(1 - share), math.log(share)


def text_of(inputs: Rendered) -> str:
    return "".join(part.text for part in inputs)


def reflector(world: World, error: float, quoting: float) -> Write:
    """Return what writes rules of failed rows, wrong or with a quoted row at these rates.

    A merge loses each rule at the rate of wrong ones.
    """
    rng = random.Random(world.seed)

    def write(inputs: Rendered, _: int) -> str:
        text = text_of(inputs)
        if merged := re.findall(r'^- "(.*)"$', text, re.MULTILINE):
            named = dict(
                reversed(re.findall(rf"({'|'.join(TOPICS)}) is (\w+)\.", " ".join(merged)))
            )
            kept = [f"{topic} is {named[topic]}." for topic in named if rng.random() >= error]
            return json.dumps([" ".join(kept)])
        (current,) = re.findall(r'The current text at .*?: (?:"(.*)"|none)\n', text)
        failed = re.findall(r"text: (.*about the (\w+) of.*)\nResult: expected '(\w+)'", text)
        found = dict.fromkeys((topic, label) for _, topic, label in failed)
        rules = []
        for topic, label in [*found][:2]:
            current = re.sub(rf" ?{topic} is \w+\.", "", current)
            other = LABELS[1 - LABELS.index(label)]
            rules.append(f"{topic} is {other if rng.random() < error else label}.")
        if failed and rng.random() < quoting:
            rules.append(f"For example {failed[0][0]}.")
        return json.dumps([" ".join([current, *rules]).strip()])

    return write


def by_scores(world: World) -> Write:
    """Return what adds guessed rules to the candidate with the lowest loss."""
    rng = random.Random(world.seed)

    def write(inputs: Rendered, _: int) -> str:
        found = re.findall(r'- loss [^\n]*?: "(.*)"', text_of(inputs))
        best, texts = found[-1] if found else "", []
        for topic in rng.sample(TOPICS, 4):
            rest = re.sub(rf" ?{topic} is \w+\.", "", best)
            texts.append(f"{rest} {topic} is {rng.choice(LABELS)}.".strip())
        return json.dumps(texts)

    return write


class Priced(ScriptedBackend):
    """A scripted model with prices in USD per million tokens, of 4 characters each."""

    def __init__(self, prompt: str, completion: str, **options: Any) -> None:
        super().__init__(**options)
        self.prices = Decimal(prompt) / 10**6, Decimal(completion) / 10**6

    async def score(self, query: Query) -> Answer:
        found = await super().score(query)
        read = sum(len(text_of(one)) for one in query.inputs) // 4
        written = sum(len(text or "") for text in found.texts) // 4 + len(query.inputs)
        usd = read * self.prices[0] + written * self.prices[1]
        usage = Usage(requests=1, prompt_tokens=read, completion_tokens=written, usd=usd)
        answered: Answer = type(found)(log_probs=found.log_probs, usage=usage, texts=found.texts)
        return answered


class Liar(RecordingTransport):
    """A device that reverses its losses, and proposes a wrong rule for each topic."""

    world: World

    async def update(self, credential: str, assignment_id: str, message: Any) -> Any:
        changes: dict[str, Any] = {"losses": message.losses[::-1]}
        if self.works[-1].reflect:
            wrong = [f"{topic} is {LABELS[label == LABELS[0]]}." for topic, label in self._rules]
            random.Random(len(self.updates)).shuffle(wrong)
            changes["proposal"] = Proposal(parent=0, text=" ".join(wrong))
        return await super().update(credential, assignment_id, message.model_copy(update=changes))

    @property
    def _rules(self) -> Sequence[tuple[str, str]]:
        return [*self.world.rules.items()]


def spec_of(kind: str, world: World) -> RunSpec:
    """Return the run of a method: reflection, scores or candidates."""
    single = [f"{topic} is {label}." for topic in TOPICS for label in LABELS]
    plain = ["", "Answer calm or urgent.", "Read the text with care."]
    candidates = [*plain, *single] if kind == "candidates" else plain
    proposer = {"kind": kind, "backend": {"kind": "openai", "model": "scripted"}, "every": 2}
    prompt: dict[str, Any] = {"slots": [{"name": "instruction", "candidates": candidates}]}
    return RunSpec.model_validate(
        {
            "name": "rules",
            "seed": world.seed,
            "task": {
                "template": "{instruction}\n{text} It is",
                "labels": {label: f" {label}" for label in LABELS},
            },
            "prompt": prompt if kind == "candidates" else {**prompt, "proposer": proposer},
            "method": {"name": "thompson", "num_samples": 4, "batch_size": 16},
            "calibration": "none",
            "participation": {"min_clients": CLIENTS, "exchange": "losses"},
            "defence": "standard" if world.liars else "none",
            "evaluation": {"every": 0},
            "rounds": 1000,
            "budget": {"queries": QUERIES},
        }
    )


@dataclass(frozen=True)
class Found:
    """What a run has reached.

    Attributes:
        queries: Until the deployable prompt answers 90 % of all rows for the rest of the run; None
            if it never does.
        usd: Likewise, with the proposer.
        share: Rows that the final prompt answers.
        calls: Of the model that writes.
        candidates: That it added.
        private: Texts that reached the server as candidates with a name or a number of a row.
    """

    queries: int | None
    usd: float | None
    share: float
    calls: int
    candidates: int
    private: int


async def run_once(kind: str, world: World, *, error: float = 0.2, quoting: float = 0.0) -> Found:
    """Run a method once."""
    model = Priced("0.10", "0.50", answer=world.answer)
    write = by_scores(world) if kind == "scores" else reflector(world, error, quoting)
    proposer = Priced("2.50", "10.00", write=write)
    rows = [row for number in range(CLIENTS) for row in world.rows(number)]
    spec = spec_of(kind, world)
    reached: list[tuple[float, int, float]] = []

    def share(instruction: str) -> float:
        right = 0.0
        for row in rows:
            named = re.findall(rf"({'|'.join(TOPICS)}) is (\w+)", instruction)
            topic = re.findall(r"about the (\w+) of", row["text"])[0]
            labels = [label for about, label in named if about == topic]
            right += (labels[-1] == row["label"]) if labels else 0.5
        return right / len(rows)

    async with serving(backend=model) as service, AsyncExitStack() as stack:
        # Instead of the model that the spec names.
        given: dict[str, Any] = {} if kind == "candidates" else {"proposer": proposer}
        run = await service.add_run(spec, spec.prompt.build(spec.task), **given)

        def measure(_: ServedRun, change: Change) -> None:
            if change.finished:
                spent = run.state.account.spent
                reached.append((share(run.prompt().text), spent.queries, float(spent.usd)))

        service.listeners.append(measure)
        lines, clients = [], []
        for number in range(CLIENTS):
            line = (Liar if number < world.liars else RecordingTransport)(service)
            if isinstance(line, Liar):
                line.world = world
            client = memory_client(
                service, data=world.rows(number), transport=line, reflect="gateway"
            )
            lines.append(line)
            clients.append(await stack.enter_async_context(client))
            await client.enrol()
        await asyncio.gather(*(client.run_forever() for client in clients))
        await service.wait(run)
        texts = [text for _, text in run.state.proposed]
        texts += [one.proposal.text for line in lines for one in line.scores if one.proposal]
    private = sum(bool(re.search(rf"\d|{'|'.join(NAMES)}", text)) for text in texts)
    below = [at for at, (right, _, _) in enumerate(reached) if right < GOAL]
    at = below[-1] + 1 if below else 0
    _, queries, usd = reached[at] if at < len(reached) else (0.0, None, None)
    return Found(
        queries=queries,
        usd=usd,
        share=reached[-1][0],
        calls=len(proposer.asked),
        candidates=len(run.state.proposed),
        private=private,
    )


CELLS: Sequence[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]] = [
    (kind, f"{who}{with_liars}", {"clustered": clustered, "liars": liars}, {})
    for with_liars, liars in (("", 0), (", 2 liars", 2))
    for who, clustered in (("IID", False), ("clustered", True))
    for kind in ("reflection", "scores", "candidates")
] + [
    ("reflection", f"clustered, {what}", {"clustered": True}, options)
    for what, options in (
        ("no error", {"error": 0.0}),
        ("error 50 %", {"error": 0.5}),
        ("every second answer quotes a row", {"quoting": 0.5}),
    )
]


def _shown(values: Sequence[float | None], digits: int) -> str:
    """Return the median; a run that does not reach the goal counts as infinite."""
    middle = median(math.inf if value is None else value for value in values)
    return "never" if middle == math.inf else f"{middle:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    # The scripted models count other tokens than their quotes.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    print("| method | clients | runs | queries | USD | rows | calls | candidates | private |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for kind, who, world, options in CELLS:
        found = [
            asyncio.run(run_once(kind, World(seed=seed, **world), **options)) for seed in seeds
        ]
        reached = sum(one.queries is not None for one in found)
        cells = (
            kind,
            who,
            f"{reached} of {len(found)}",
            _shown([one.queries for one in found], 0),
            _shown([one.usd for one in found], 3),
            f"{mean(one.share for one in found):.1%}",
            f"{mean(one.calls for one in found):.0f}",
            f"{mean(one.candidates for one in found):.0f}",
            f"{sum(one.private for one in found)}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
