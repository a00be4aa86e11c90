"""Every loss through whole federations: queries, updates, results."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from fedone_sdk.aggregator import Service
from fedone_sdk.backends import Want
from fedone_sdk.budget import Usage
from fedone_sdk.client import EdgeClient
from fedone_sdk.errors import DataError, FedOneError, SpecError
from fedone_sdk.evaluation.results import Entrant
from fedone_sdk.local import Federation, load_score, plan_run, simulate
from fedone_sdk.local.comparison import Contest, costs_of
from fedone_sdk.messages import MAX_WRITTEN_CHARS, RunResult
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import Example, Rendered, TaskSpec, render
from fedone_sdk.testing import (
    LoopbackFederation,
    ScriptedBackend,
    pseudo_log_probs,
    pseudo_reference_log_prob,
    pseudo_text,
)
from fedone_sdk.vocabulary import Vocabulary
from tests.by_hand import device_of
from tests.edge import run_to_end
from tests.runs import WORDS, RecordingTransport, memory_client, run_spec, serving

LABELS = {"labels": {0: " no", 1: " yes"}}
GENERATION = {"template": "{prompt} {text}"}
TASKS: dict[str, dict[str, Any]] = {
    "cross_entropy": LABELS,
    "brier": LABELS,
    "hinge": LABELS,
    "zero_one": LABELS,
    "nll": {"label_field": "answer"},
    "score": {"max_tokens": 3},
}


def rows(count: int, kind: str = "train") -> tuple[Example, ...]:
    """Examples; what is in capitals is private."""
    return tuple(
        {"text": f"{kind} {n}", "label": n % 2, "answer": f" ANSWER {n}", "who": f"PATIENT {n}"}
        for n in range(count)
    )


def spec_of(loss: str, exchange: str = "losses", batch_size: int = 4, **more: Any) -> RunSpec:
    few = {"num_samples": 3, "batch_size": batch_size, "learning_rate": 0.05}
    sections: dict[str, Any] = {
        "task": {**GENERATION, "loss": loss, **TASKS[loss]},
        "participation": {"exchange": exchange},
        "evaluation": {"every": 2, "examples": 5},
        **more,
    }
    return run_spec(method=few, **{"rounds": 4, **sections})


def federation_of(spec: RunSpec, **more: Any) -> Federation:
    data = rows(6)
    # The choice must not depend on the order of arrival.
    part = spec.participation.model_copy(update={"min_clients": 2})
    spec = spec.model_copy(update={"participation": part})
    given: dict[str, Any] = {
        "spec": spec,
        "shards": (data[:3], data[3:]),
        "dev": rows(7, "dev"),
        "vocabulary": WORDS,
        "reused_rows": False,
        "score": private_score if spec.task.loss == "score" else None,
    }
    return Federation(**{**given, **more})


def private_score(generated: str, example: Example) -> float:
    """Uses a column that the model never sees."""
    return int(generated.split()[example["label"]], 16) / 15


async def run_of(loss: str, exchange: str = "losses", **backend: Any) -> RunResult:
    federation = federation_of(spec_of(loss, exchange))
    async with asyncio.timeout(20):
        return await simulate(federation, backend=ScriptedBackend(**backend))


def text_of(inputs: Rendered) -> str:
    return "".join(part.text for part in inputs)


def metric_by_hand(task: TaskSpec, prompt: str, examples: Sequence[Example]) -> float:
    """The metric straight from what the double answers, with none of the code under test."""
    values = []
    for example in examples:
        inputs = render(task, prompt, example)
        if task.loss == "nll":
            values.append(-pseudo_reference_log_prob(inputs, example["answer"]))
        elif task.loss == "score":
            values.append(1 - private_score(pseudo_text(inputs, 3), example))
        else:
            no, yes = pseudo_log_probs(inputs, (" no", " yes"))
            values.append(float((yes > no) == bool(example["label"])))
    return sum(values) / len(values)


class TestRuns:
    @pytest.mark.parametrize("loss", TASKS)
    async def test_both_exchanges_end_alike_and_measure_what_they_should(self, loss: str) -> None:
        found = [await run_of(loss, exchange) for exchange in ("alpha", "losses")]
        assert len({result.alpha_sha256 for result in found}) == 1
        task, dev = spec_of(loss).task, rows(7, "dev")
        for result in found:
            assert result.status == "completed"
            assert result.metric.name == ("loss" if task.generates else "accuracy")
            for prompt, value in (
                ("", result.metric.no_prompt),
                (result.prompt.text, result.metric.after),
            ):
                assert value == pytest.approx(metric_by_hand(task, prompt, dev), rel=1e-6)
            assert result.metric.before is not None
            curve = [report.metric is not None for report in result.history]
            assert curve == [False, True, False, True]
            assert result.spent.queries == 4 * 3
            # Ends: 3 prompts on 7 examples in batches of 4; curve: 2 points on 5.
            assert result.evaluation.queries == 3 * 2 + 2 * 2
            assert result.spent.requests == 12 + 10

    @pytest.mark.parametrize("loss", ["nll", "score", "zero_one"])
    async def test_training_is_moved_by_the_loss(self, loss: str) -> None:
        """The same run on a model that answers all alike ends elsewhere."""
        flat: dict[str, Any] = {"reference": lambda *_: -1.0, "write": lambda *_: "3 3 3"}
        other = await run_of(loss, answer=lambda *_: (-1.0, -2.0), **flat)
        assert (await run_of(loss)).alpha_sha256 != other.alpha_sha256

    @pytest.mark.parametrize("exchange", ["alpha", "losses"])
    @pytest.mark.parametrize("loss", ["nll", "score", "zero_one"])
    async def test_a_model_of_the_clients_own_gives_the_gateways_alpha(
        self, loss: str, exchange: str
    ) -> None:
        hashes = set()
        for gateway in True, False:
            model = ScriptedBackend()
            spec = spec_of(loss, exchange)
            async with (
                asyncio.timeout(20),
                LoopbackFederation(spec, WORDS, backend=model if gateway else None) as federation,
                federation.client(
                    rows(6), backend=None if gateway else model, score=private_score
                ) as client,
            ):
                await client.run_forever()
                result = federation.run.result()
            assert result.status == "completed"
            assert len(model.asked) > 0
            hashes.add(result.alpha_sha256)
        assert len(hashes) == 1

    @pytest.mark.parametrize("calibration", ["labels", "none"])
    async def test_a_prompt_has_to_earn_its_length(self, calibration: str) -> None:
        long = " a long text" * 10  # 30 tokens

        def answer(inputs: Rendered, words: Sequence[str]) -> tuple[float, ...]:
            text = text_of(inputs)
            right = int(text.split()[-1]) % 2
            share = 0.6 + 0.2 * (long in text)  # Better by 0.29 nats.
            return tuple(math.log(share if at == right else 1 - share) for at in range(2))

        deployed = []
        for penalty in (0.0, 0.29 / 30 * 0.8, 0.29 / 30 * 1.2):
            listed = {"kind": "list", "candidates": ["", long]}
            prompt = {"length": 1, "vocabulary": listed, "length_penalty": penalty}
            spec = run_spec(
                task={**GENERATION, **LABELS},
                prompt=prompt,
                method={"name": "thompson", "num_samples": 2, "batch_size": 3},
                calibration=calibration,
                rounds=8,
            )
            federation = federation_of(spec, vocabulary=Vocabulary(candidates=("", long)))
            result = await simulate(federation, backend=ScriptedBackend(answer))
            deployed.append(result.prompt.text)
        assert deployed == [long, long, ""]

    async def test_the_cheapest_prompt_that_may_be_as_good_is_measured_if_prompts_cost(
        self,
    ) -> None:
        words = ("", " short", " a long text" * 10)

        def answer(inputs: Rendered, _: Sequence[str]) -> tuple[float, ...]:
            text = text_of(inputs)
            right = int(text.split()[-1]) % 2
            share = 0.905 if words[2] in text else 0.9 if words[1] in text else 0.6
            return tuple(math.log(share if at == right else 1 - share) for at in range(2))

        for price in (0, 0.1):
            prices = {"prompt": price, "completion": 0}
            spec = run_spec(
                task={**GENERATION, **LABELS},
                prompt={"length": 1, "vocabulary": {"kind": "list", "candidates": [*words]}},
                method={"name": "thompson", "num_samples": 3, "batch_size": 3},
                backend={"kind": "openai", "model": "m", "prices": prices},
                rounds=8,
            )
            federation = federation_of(spec, vocabulary=Vocabulary(candidates=words))
            plan = await plan_run(federation, backend=ScriptedBackend())
            result = await simulate(federation, backend=ScriptedBackend(answer))
            assert result.verdict is not None
            short = result.verdict.standing("cheapest")
            assert result.prompt.text == words[2]
            assert plan.evaluation_queries == (12 if price else 9)
            assert result.evaluation.queries == plan.evaluation_queries
            if price:
                assert short is not None
                assert short.prompt is not None
                assert (short.prompt.text, short.tokens) == (words[1], 2)
                assert short.prompt.bias is not None  # It belongs to the prompt.
            else:
                assert short is None

    async def test_the_planned_cost_of_a_baseline_covers_its_texts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worst = lambda _, size, most=0: Usage(queries=1, completion_tokens=size * most)  # noqa: E731
        monkeypatch.setattr(ScriptedBackend, "worst_case", worst)
        federation = federation_of(spec_of("score"))
        entrant = Entrant(name="no-prompt", kind="baseline", spec=federation.spec)
        contest = Contest(entrant=entrant, federation=federation, folder=Path(), cache=Path())
        costs = await costs_of([contest], ScriptedBackend())
        assert costs.most.completion_tokens == 2 * 4 * 3  # 2 queries of 4 texts of 3 tokens.

    async def test_a_model_without_log_probs_is_tuned_by_what_it_chooses(self) -> None:
        wants = []
        shown: tuple[list[Want], ...] = (["labels", "choice"], ["choice", "text"])
        for model in (ScriptedBackend(answers=answers) for answers in shown):
            async with asyncio.timeout(20):
                result = await simulate(federation_of(spec_of("zero_one")), backend=model)
            wants.append(({query.want for query in model.asked}, result.alpha_sha256))
        (first, sha256), (second, same) = wants
        # Where there are log-probabilities, the likeliest label is the one that is chosen.
        assert (first, second) == ({"labels"}, {"choice"})
        assert sha256 == same

    async def test_the_queries_of_the_model(self) -> None:
        for loss in TASKS:
            model = ScriptedBackend()
            async with asyncio.timeout(20):
                await simulate(federation_of(spec_of(loss)), backend=model)
            for query in model.asked:
                assert query.label_words == (() if loss in ("nll", "score") else (" no", " yes"))
                assert query.max_tokens == (3 if loss == "score" else 0)
                expected = [f" ANSWER {text_of(inputs).split()[-1]}" for inputs in query.inputs]
                assert list(query.references) == (expected if loss == "nll" else [])

    @pytest.mark.parametrize("loss", ["nll", "score"])
    @pytest.mark.parametrize("gateway", [True, False])
    async def test_an_example_that_failed_counts_for_no_prompt(
        self, loss: str, gateway: bool
    ) -> None:
        def fails(inputs: Rendered) -> bool:
            return "good" in text_of(inputs) and "train 1" in text_of(inputs)

        model = ScriptedBackend(
            reference=lambda inputs, text: None if fails(inputs) else -4.0 * (text[-1] == "1"),
            write=lambda inputs, _: None if fails(inputs) else "0 f",
        )
        async with (
            asyncio.timeout(20),
            LoopbackFederation(
                spec_of(loss, batch_size=5), WORDS, backend=model if gateway else None
            ) as federation,
            federation.client(
                rows(5), backend=None if gateway else model, score=private_score
            ) as client,
        ):
            await client.run_forever()
            result = federation.run.result()
        assert result.status == "completed"
        # Of five examples train 1 alone has 4 nats; the scores are 0, 1, 0, 1, 0. In every round
        # one of the prompts fails on train 1, and train 1 counts for none of them.
        found = {round(report.mean_loss, 6) for report in result.history}
        assert found == {0.0 if loss == "nll" else 3 / 4}


class Bench:
    """A service in memory, and one watched client that works to the end."""

    def __init__(self, service: Service) -> None:
        self.service, self.run = service, service.runs["run"]
        self.transport = RecordingTransport(service)

    @property
    def bodies(self) -> list[str]:
        """Every body that leaves the device with its work."""
        sent = self.transport
        messages = (*sent.scores, *sent.updates, *sent.declines)
        return [message.model_dump_json() for message in messages]

    def client(self, data: Sequence[Example] | None, **options: Any) -> EdgeClient:
        rows_of_it = rows(6) if data is None else data
        label = self.run.spec.task.label_field
        consent = {"label": label, "fields": ("text", label)}
        options = {**consent, "transport": self.transport, **options}
        return memory_client(self.service, data=rows_of_it, **options)

    async def work(self, data: Sequence[Example] | None = None, **options: Any) -> RunResult:
        async with asyncio.timeout(20), self.client(data, **options) as client:
            await run_to_end(client)
        return self.run.result()

    async def unfit(self, data: Sequence[Example] | None = None, **options: Any) -> str:
        """Why a client fits no work of the run, which waits for others."""
        async with self.client(data, **options) as client:
            assert (await client.run_once()).outcome == "declined"
        assert self.run.state.running
        assert self.run.state.account.held == Usage()
        return self.run.state.unfit[0]


@asynccontextmanager
async def bench_of(spec: RunSpec, backend: ScriptedBackend | None) -> AsyncIterator[Bench]:
    async with serving(spec, backend=backend) as service:
        yield Bench(service)


class TestPrivacy:
    @pytest.mark.parametrize("exchange", ["alpha", "losses"])
    @pytest.mark.parametrize("loss", TASKS)
    async def test_only_reference_texts_leave_with_the_texts(
        self, loss: str, exchange: str
    ) -> None:
        async with bench_of(spec_of(loss, exchange), ScriptedBackend()) as bench:
            await bench.work(score=private_score)
        bodies = bench.bodies
        assert len(bodies) == 2 * 4
        assert any('"text":"train 3"' in body for body in bodies)
        assert not any("PATIENT" in body or '"label"' in body for body in bodies)
        assert any("ANSWER" in body for body in bodies) == (loss == "nll")

    @pytest.mark.parametrize("gateway", [True, False])
    async def test_a_reference_passes_the_hook(self, gateway: bool) -> None:
        model = ScriptedBackend()
        seen = set()

        def before_send(text: str) -> str | None:
            seen.add(text)
            return None if text == " ANSWER 5" else text.replace("ANSWER", "REDACTED")

        async with bench_of(spec_of("nll"), model if gateway else None) as bench:
            await bench.work(before_send=before_send, backend=None if gateway else model)
        assert {" ANSWER 3", "train 3"} <= seen
        asked = set(itertools.chain.from_iterable(query.references for query in model.asked))
        assert " REDACTED 3" in asked
        assert not any("ANSWER" in text or text.endswith("5") for text in asked)

    async def test_the_hook_sees_no_label_of_another_loss(self) -> None:
        seen = set()

        async with bench_of(spec_of("score"), ScriptedBackend()) as bench:
            await bench.work(before_send=lambda t: seen.add(t) or t, score=private_score)
        assert seen <= {row["text"] for row in rows(6)}

    @pytest.mark.parametrize("gateway", [True, False])
    async def test_a_broken_score_function_sends_no_text_to_the_server(self, gateway: bool) -> None:
        def score(generated: str, example: Example) -> float:
            raise KeyError(example["who"])

        model = ScriptedBackend()
        async with bench_of(spec_of("score"), model if gateway else None) as bench:
            result = await bench.work(score=score, backend=None if gateway else model)
        assert not any("PATIENT" in body for body in bench.bodies)
        assert result.status == "failed"
        assert "the score function failed with KeyError" in str(result.reason)


class TestBrokenClients:
    async def test_without_a_score_function_no_query_is_sent(self) -> None:
        model = ScriptedBackend()
        async with bench_of(spec_of("score"), model) as bench:
            assert "this client has none" in await bench.unfit()
        assert model.asked == []

    async def test_a_broken_score_function_is_billed_all_the_same(self) -> None:
        """The cost of a client's own model is reported, even without a result."""
        model = ScriptedBackend()
        async with bench_of(spec_of("score"), None) as bench:
            await bench.work(score=lambda *_: 2.0, backend=model)
        used = [message.usage for message in bench.transport.declines]
        assert {usage.queries for usage in used} == {3}
        assert sum(usage.requests for usage in used) == len(model.asked) > 0

    async def test_a_model_that_cannot_answer(self) -> None:
        model = ScriptedBackend(answers=["labels"])
        async with bench_of(spec_of("nll"), None) as bench:
            output = await bench.unfit(backend=model)
        assert "needs log-probabilities of reference texts, which this backend does not" in output

    @pytest.mark.parametrize("answer", [None, 3, "", "x" * 20_001])
    async def test_examples_without_a_fit_reference_are_left_out(self, answer: object) -> None:
        model = ScriptedBackend()
        data = [*rows(3), {"text": "train 9", "answer": answer}, {"text": "train 9"}]
        async with bench_of(spec_of("nll"), model) as bench:
            result = await bench.work(data)
        assert result.status == "completed"
        assert not any("9" in text_of(i) for query in model.asked for i in query.inputs)
        async with bench_of(spec_of("nll"), ScriptedBackend()) as bench:
            assert "no row is complete: field 'answer' " in await bench.unfit(data[3:])

    async def test_a_score_function_needs_no_label(self) -> None:
        async with bench_of(spec_of("score"), ScriptedBackend()) as bench:
            data = [{"text": f"train {n}", "references": ["a", "b"]} for n in range(4)]
            result = await bench.work(data, score=lambda _, row: len(row["references"]) / 4)
        assert result.status == "completed"
        assert {report.mean_loss for report in result.history} == {0.5}


class TestGateway:
    @pytest.mark.parametrize(
        ("loss", "references", "output"),
        [
            ("nll", (), "references: 0 were sent, loss nll takes 2"),
            ("nll", (" a",), "references: 1 were sent, loss nll takes 2"),
            ("nll", (" a",) * 3, "references: 3 were sent, loss nll takes 2"),
            ("score", (" a", " b"), "references: 2 were sent, loss score takes 0"),
            ("zero_one", (" a", " b"), "references: 2 were sent, loss zero_one takes 0"),
        ],
    )
    async def test_as_many_references_as_the_loss_takes(
        self, loss: str, references: tuple[str, ...], output: str
    ) -> None:
        model = ScriptedBackend()
        async with bench_of(spec_of(loss), model) as bench:
            device = await device_of(bench.service)
            assert await device.claim() is not None
            problem = await device.refused(references=references)
            assert (problem.code, problem.detail) == ("invalid_message", output)
        assert model.asked == []

    @pytest.mark.parametrize("gateway", [True, False])
    async def test_a_text_is_no_longer_than_a_message_may_carry(self, gateway: bool) -> None:
        """The same text is scored, wherever the model runs."""
        model = ScriptedBackend(write=lambda *_: "x" * (MAX_WRITTEN_CHARS + 1))
        lengths = set()

        def score(generated: str, example: Example) -> float:
            lengths.add(len(generated))
            return 1.0

        async with bench_of(spec_of("score"), model if gateway else None) as bench:
            result = await bench.work(score=score, backend=None if gateway else model)
        assert result.status == "completed"
        assert lengths == {MAX_WRITTEN_CHARS}


class TestRefusedAtTheStart:
    @pytest.mark.parametrize(
        ("loss", "answers", "output"),
        [
            ("cross_entropy", ["choice"], "cross_entropy needs log-probabilities of label words"),
            ("hinge", ["choice", "text"], "set loss: zero_one, or estimate them by log_probs"),
            ("nll", ["labels", "text"], "needs log-probabilities of reference texts"),
            ("score", ["labels"], "needs generated texts, which this backend does not"),
            ("zero_one", ["text"], "needs log-probabilities of label words"),
        ],
    )
    async def test_a_model_that_cannot_answer(self, loss: str, answers: Any, output: str) -> None:
        model = ScriptedBackend(answers=answers)
        with pytest.raises(SpecError, match=output) as caught:
            await simulate(federation_of(spec_of(loss)), backend=model)
        assert caught.value.problems[0].startswith(f"task.loss: {loss} needs ")
        assert model.asked == []

    async def test_a_federation_without_its_score_function(self) -> None:
        model = ScriptedBackend()
        with pytest.raises(SpecError, match="requires Federation"):
            await simulate(federation_of(spec_of("score"), score=None), backend=model)
        assert model.asked == []

    async def test_a_servers_score_function_is_never_imported_for_its_clients(self) -> None:
        """What a posted run names stays a name; the devices bring their own function."""
        task = {**GENERATION, "loss": "score", "score": "fedone_no_such_module:f"}
        spec = spec_of("score", task={**task, "max_tokens": 3})
        async with bench_of(spec, ScriptedBackend()) as bench:
            result = await bench.work(score=private_score)
        assert result.status == "completed"


class TestEvaluation:
    @pytest.mark.parametrize(
        ("score", "output"),
        [
            (lambda *_: 7.0, "task.score: the score function returned 7.0"),
            (lambda _, row: row["nothing"], "the score function failed with KeyError: 'nothing'"),
        ],
    )
    async def test_a_broken_score_function_pauses_the_run(self, score: Any, output: str) -> None:
        """More queries would not help, and those that were sent are charged."""

        def only_on_dev(generated: str, example: Example) -> float:
            if example["text"].startswith("dev"):
                return float(score(generated, example))
            return 0.5

        model = ScriptedBackend()
        spec = spec_of("score", rounds=1000)
        async with asyncio.timeout(20):
            result = await simulate(federation_of(spec, score=only_on_dev), backend=model)
        assert result.status == "stopped"
        assert str(result.reason).startswith("paused: ")
        assert output in str(result.reason)
        assert result.spent.requests == len(model.asked)
        assert result.metric.after is None


class TestPlan:
    @pytest.mark.parametrize("loss", TASKS)
    async def test_a_plan_is_what_is_then_spent(self, loss: str) -> None:
        model = ScriptedBackend()
        federation = federation_of(spec_of(loss))
        plan = await plan_run(federation, backend=model)
        assert model.asked == []
        result = await simulate(federation, backend=model)
        assert plan.training_queries == result.spent.queries
        assert plan.evaluation_queries == result.evaluation.queries
        assert plan.most.requests >= result.spent.requests
        assert plan.most.prompt_tokens >= result.spent.prompt_tokens


class TestLoading:
    def load(self, folder: Path, loss: str, data: str, **task: Any) -> Federation:
        (folder / "rows.jsonl").write_text(data)
        spec = spec_of(
            loss,
            task={**GENERATION, "loss": loss, **TASKS[loss], **task},
            data={"train": "rows.jsonl", "dev": "rows.jsonl", "num_clients": 2},
        )
        return Federation.load(spec, folder)

    @pytest.mark.parametrize(
        ("row", "output"),
        [
            ('{"text": "b"}', "row 2: field 'answer' is missing"),
            ('{"text": "b", "answer": 3}', "row 2: field 'answer' is int; it must be text"),
            ('{"text": "b", "answer": null}', "row 2: field 'answer' is NoneType"),
            ('{"text": "b", "answer": ""}', "row 2: field 'answer' is empty"),
            ('{"text": "b", "answer": "\\ud800"}', "row 2: field 'answer' has half of"),
        ],
    )
    def test_references_are_checked_before_any_query(
        self, tmp_path: Path, row: str, output: str
    ) -> None:
        with pytest.raises(DataError, match=f"data.train: rows.jsonl: {output}"):
            self.load(tmp_path, "nll", f'{{"text": "a", "answer": " x"}}\n{row}\n')

    def test_rows_of_generation_are_all_of_one_class(self, tmp_path: Path) -> None:
        data = "".join(f'{{"text": "t{n}", "answer": " x{n}"}}\n' for n in range(6))
        with capture_logs() as logs:
            found = self.load(tmp_path, "nll", data)
        assert [(log["event"][:31], log["rows"]) for log in logs] == [
            ("dev rows are also training rows", 6)
        ]
        assert sorted(row["text"] for shard in found.shards for row in shard) == [
            f"t{n}" for n in range(6)
        ]
        assert found.score is None

    def test_a_score_function_next_to_the_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "path", sys.path.copy())
        module = f"beside_{tmp_path.name}"
        (tmp_path / f"{module}.py").write_text("def score(generated, example):\n    return 0.25\n")
        data = '{"text": "a", "targets": ["b"]}\n' * 4  # It needs no label.
        found = self.load(tmp_path, "score", data, score=f"{module}:score")
        assert found.score is not None
        assert found.score("", {}) == 0.25

    @pytest.mark.parametrize(
        ("name", "output"),
        [
            (None, "task.score: is required for loss score; set exact_match, contains, "),
            ("json:__name__", "task.score: 'json:__name__' is not a function or class"),
            ("{module}:f", "ZeroDivisionError: division by zero"),
        ],
    )
    def test_a_score_function_that_cannot_be_had(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, output: str
    ) -> None:
        monkeypatch.setattr(sys, "path", sys.path.copy())
        module = f"broken_{tmp_path.name}"
        (tmp_path / f"{module}.py").write_text("1 / 0\n")
        task: Mapping[str, Any] = {**GENERATION, "loss": "score"}
        if name is not None:
            task = {**task, "score": name.format(module=module)}
        with pytest.raises(FedOneError) as caught:
            load_score(TaskSpec.model_validate(task), tmp_path)
        assert output in str(caught.value)
        assert "\n" not in str(caught.value)
