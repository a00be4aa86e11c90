"""A process's copy of a run: its state and history, its reports, and its export."""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedone_sdk import messages
from fedone_sdk.aggregator.concurrency import in_thread_if_large
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.rounds.run_state import Lineage, RunState, decode
from fedone_sdk.algorithms import alpha_sha256
from fedone_sdk.algorithms.observations import standings
from fedone_sdk.algorithms.prompt_search import PromptSearch
from fedone_sdk.backends import price_of
from fedone_sdk.budget import NOTHING
from fedone_sdk.candidates import no_prompt, prompt_of
from fedone_sdk.clock import Clock, SystemClock
from fedone_sdk.errors import BackendError, ResultError, SpecError, one_line
from fedone_sdk.evaluation.outcomes import Outcomes, Which, seeks_cheapest
from fedone_sdk.evaluation.verdict import judge, not_measured, sentence, with_lengths
from fedone_sdk.metrics import MetricFunction
from fedone_sdk.spec import OwnMethodSpec, RunSpec
from fedone_sdk.stores import LogEntry, RunRecord, Store, log_pages
from fedone_sdk.task import Bias, TextPrompt
from fedone_sdk.vocabulary import Vocabulary

_MAX_LOST = 200
"""Number of lost assignments kept in memory; the log contains all of them."""


@dataclass(slots=True)
class Counters:
    """Counters of traffic and answers, stored with the next commit.

    A crash, or a commit whose outcome is unknown, loses the newest counts.

    Attributes:
        values: Number of log-probabilities in answers.
        censored: Number of log-probabilities that are only upper bounds.
        unpriced: Number of requests without a known price.
    """

    communication: messages.Traffic = field(default_factory=messages.Traffic)
    gateway: messages.Traffic = field(default_factory=messages.Traffic)
    cache_hits: int = 0
    values: int = 0
    censored: int = 0
    unpriced: int = 0

    def plus(self, other: Counters) -> Counters:
        """Return the sum."""
        names = ("cache_hits", "values", "censored", "unpriced")
        return Counters(
            communication=self.communication.sum(other.communication),
            gateway=self.gateway.sum(other.gateway),
            **{name: getattr(self, name) + getattr(other, name) for name in names},
        )


_COUNTERS = TypeAdapter(Counters)

_Line = tuple[LogEntry, Any]
"""A line of the run's log, and its parsed content; None for kinds that are not kept in memory."""


def _parse_lines(entries: Iterable[LogEntry]) -> list[_Line]:
    return [(entry, _parse_line(entry)) for entry in entries]


def _parse_line(entry: LogEntry) -> Any:
    match entry.kind:
        case "lost":
            return messages.LostWork.model_validate_json(entry.body)
        case "round":
            return messages.RoundReport.model_validate(json.loads(entry.body)["report"])
        case "rollback" | "metric":
            return json.loads(entry.body)
    return None


class RunView:
    """A copy of a run, and the reports that are made from it.

    Attributes:
        base: The `RoundMachine` (the fixed parts of a run) for the initial candidates.
        machine: The machine for the current candidates and the current `RoundMachine.planned`.
        initial_vocabulary: The initial candidates, without the ones that were added during the run.
        vocabulary: The current candidates.
        state: This replica's copy of the state.
        version: Version of the copy.
        lost: The newest lost assignments, oldest first.
    """

    def __init__(self, machine: RoundMachine, vocabulary: Vocabulary, clock: Clock) -> None:
        self.base = self.machine = machine
        self.initial_vocabulary = vocabulary
        self._proposed: tuple[tuple[str, str], ...] = ()
        self.vocabulary = vocabulary
        self._clock = clock
        self.state = machine.initial_state()
        self.version = 0
        self._stored_counters = Counters()
        self._logged = -1
        self._created_at: float | None = None
        self._active_at: float | None = None
        self.history: list[messages.RoundReport] = []
        self.lost: deque[messages.LostWork] = deque(maxlen=_MAX_LOST)

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.base.run_id

    @property
    def spec(self) -> RunSpec:
        """Spec of the run."""
        return self.base.spec

    @property
    def live(self) -> bool:
        """Whether the run must be served, because it is running or paused or has open work."""
        state = self.state
        open_work = state.seats or state.account.leases or state.evaluation.leases
        return state.running or state.paused or bool(open_work)

    @property
    def counters(self) -> Counters:
        """Traffic, cache hits and scored values."""
        return self._stored_counters

    async def read(self, record: RunRecord, log: AsyncIterable[Iterable[LogEntry]]) -> None:
        """Replace the copy by a stored version; `log` yields the unread pages of the run's log."""
        # All reads and checks come before the first change, so an error leaves the copy as it is.
        lines: list[_Line] = []
        async for page in log:
            page = [entry for entry in page if entry.version <= record.version]
            size = sum(len(entry.body) for entry in page)
            lines += await in_thread_if_large(size, _parse_lines, page)
        document = json.loads(record.document)
        counters = _COUNTERS.validate_python(document.pop("counters"))
        state = await in_thread_if_large(len(record.arrays), decode, document, record.arrays)
        self._stored_counters, self.state = counters, state
        self.version, self._created_at = record.version, record.created_at
        self._on_new_state()
        self._add_lines(lines)

    def _on_new_state(self) -> None:
        self.machine = self.base.at(self.state)
        if self._proposed != self.state.proposed:
            self._proposed = self.state.proposed
            self.vocabulary = self.initial_vocabulary.with_candidates(self._proposed)

    def _add_lines(self, lines: Iterable[_Line]) -> None:
        for entry, content in lines:
            match entry.kind:
                case "round":
                    self.history.append(content)
                case "lost":
                    self.lost.append(content)
                case "rollback":
                    del self.history[content["round"] :]
                case "metric":
                    self._add_metric(content["round"], content["value"])
            self._logged = entry.version

    def _add_metric(self, round_number: int, value: float) -> None:
        self.history = [
            report.model_copy(update={"metric": value}) if report.round == round_number else report
            for report in self.history
        ]

    @property
    def summary(self) -> messages.RunSummary:
        """Summary of the run."""
        state = self.state
        return messages.RunSummary(
            run_id=self.run_id,
            status=state.status,
            round=state.round,
            rounds=self.spec.rounds,
            cap=messages.Cap.of(state.account.cap),
            spent=state.account.spent,
            priced=not self.counters.unpriced,
            created_at=self._created_at,
            ended_at=state.ended_at,
            metric=self._newest_metric,
            metric_name=state.metric.name,
            active_at=self._active_at,
        )

    @property
    def standings(self) -> tuple[messages.Standing, ...]:
        """The newest metric of each prompt that the verdict compares."""
        state = self.state
        if state.verdict is not None and state.verdict.standings:
            return state.verdict.standings
        return state.metric.model_copy(update={"after": self._newest_metric}).standings

    @property
    def _newest_metric(self) -> float | None:
        if self.state.metric.after is not None:
            return self.state.metric.after
        measured = (r.metric for r in reversed(self.history) if r.metric is not None)
        return next(measured, self.state.metric.before)

    @property
    def task(self) -> messages.RunTask:
        """Description of the run for clients."""
        method, task = self.spec.method, self.spec.task
        # Devices need `description` only to write candidates, and `score` only if it has a schema.
        unused = {} if self.spec.prompt.reflects else {"description": None}
        unused |= {"score": None} if task.answer_schema is None else {}
        return messages.RunTask(
            task=task.model_copy(update=unused),
            task_crc32=task.crc32,
            method=method.for_devices() if isinstance(method, OwnMethodSpec) else method,
            prompt_len=self.spec.prompt.length,
            vocab_size=self.machine.vocab_size,
            blank=self.vocabulary.blank,
            layout=self.machine.layout,
            vocabulary_sha256=self.vocabulary.sha256,
            vocabulary_version=len(self.state.proposed),
            gateway=self.machine.gateway_model is not None,
            model=self.state.model,
            loss_clip=self.machine.loss_clip,
            privacy=self.spec.privacy,
            calibration=self.spec.calibration,
            reflection=self._reflection,
        )

    @property
    def _reflection(self) -> messages.Reflection | None:
        prompt = self.spec.prompt
        if prompt.proposer is None or prompt.proposed_slot is None or not prompt.reflects:
            return None
        return messages.Reflection(
            slot=prompt.proposed_slot, gateway=prompt.proposer.backend is not None
        )

    def vocabulary_list(self, after: int = 0) -> messages.VocabularyList:
        """Return all candidates, or only those added after a version."""
        proposed = self.state.proposed
        if after:
            return messages.VocabularyList(appended=proposed[after:], version=len(proposed))
        known = self.vocabulary
        return messages.VocabularyList(
            candidates=known.candidates, slots=known.slots, version=len(proposed)
        )

    def prompt(self, state: RunState | None = None) -> messages.PromptReport:
        """Return the prompt that the run would return in a state, by default the current state."""
        state = state or self.state
        bias = self.machine.bias(state)
        indices = self.machine.method.prompt(state.method).tolist()
        return messages.PromptReport.of(self.spec.task, self.vocabulary, indices, bias)

    def text_prompt(self, indices: Sequence[int], proposed: str | None = None) -> TextPrompt:
        """Return a prompt's texts; `proposed` replaces the text of the proposer's slot."""
        changed = None if proposed is None else {self.spec.prompt.proposed_slot or "": proposed}
        return prompt_of(self.spec.task, self.vocabulary, indices, changed)

    def result(self) -> messages.RunResult:
        """Return the current or final result of the run."""
        state, counters = self.state, self.counters
        # Calls of open assignments count as spent, although the leases are not settled yet.
        working = (seat for seat in state.seats if seat.phase == "working")
        calls = sum((seat.used + seat.max_pending for seat in working), NOTHING)
        began = state.started_at
        until = state.ended_at if state.ended_at is not None else self._clock.now()
        return messages.RunResult(
            run_id=self.run_id,
            name=self.spec.name,
            status=state.status,
            reason=state.reason,
            rounds=state.round,
            cap=messages.Cap.of(state.account.cap),
            spent=state.account.spent + calls,
            leased=state.account.leased.beyond(calls),
            cache=messages.CacheReport(hits=counters.cache_hits),
            censoring=messages.CensoringReport(values=counters.values, censored=counters.censored),
            evaluation=state.evaluation.spent,
            proposer=state.proposer,
            lineage=tuple(self._lineage()),
            judge=state.judge,
            communication=counters.communication,
            gateway=counters.gateway,
            priced=not counters.unpriced,
            metric=state.metric,
            verdict=self._verdict(),
            history=tuple(self.history),
            prompt=self.prompt(),
            alpha_sha256=alpha_sha256(state.method.alpha),
            model=state.model,
            models=state.models,
            privacy=self.machine.releases and self.machine.releases.report(state.releases),
            quarantined=len(state.quarantined),
            wall_s=0.0 if began is None else max(round(until - began, 3), 0.0),
            seed=self.spec.seed,
        )

    def _lineage(self) -> Iterator[messages.Written]:
        slot, lineage = self.spec.prompt.proposed_slot, self.state.lineage
        if slot is None or not lineage:
            return
        texts, position = self.vocabulary.candidates_of(slot), self.machine.proposed_position
        method = self.state.method
        losses = standings(method.memory, position, len(texts)).losses
        deployed = texts[self.machine.method.prompt(method)[position]]
        children = defaultdict[str, list[Lineage]](list)
        for origin in reversed(lineage):
            children[texts[origin.parents[0]]].append(origin)
        written = {origin.text for origin in lineage}
        stack = [(root, 0) for root in reversed(lineage) if texts[root.parents[0]] not in written]
        while stack:
            origin, depth = stack.pop()
            text, parents = origin.text, list(origin.parents)
            stack += [(child, depth + 1) for child in children[text]]
            gain = math.nan
            if text in texts:  # A text that waits for the end of the round has no losses yet.
                gain = float(losses[parents].min() - losses[texts.index(text)])
            yield messages.Written(
                text=text,
                client=origin.client,
                parents=tuple(texts[parent] for parent in parents),
                depth=depth,
                gain=gain if math.isfinite(gain) else None,
                won=text == deployed,
            )

    def compute_verdict(
        self, outcomes: Mapping[Which, Outcomes], measure: MetricFunction | None = None
    ) -> messages.Verdict:
        """Return the verdict: whether tuning improved the metric."""
        method, bare = self.machine.method, no_prompt(self.spec.task, self.vocabulary)
        verdict = judge(
            self.spec.task,
            outcomes,
            plain_bias=self.machine.plain_bias(self.state),
            empty=self._deployable == bare,
            measure=measure,
        )
        prompts: dict[messages.Compared, TextPrompt] = {
            "no_prompt": bare,
            "no_prompt_biased": bare,
            "untrained": self.text_prompt(method.prompt(method.init()).tolist()),
            "tuned": self._deployable,
        }
        reports = dict[messages.Compared, messages.PromptReport]()
        if (short := self.cheapest()) is not None:
            prompts["cheapest"] = self.text_prompt(short[0])
            reports["cheapest"] = messages.PromptReport.of(self.spec.task, self.vocabulary, *short)
        return self._with_text(with_lengths(verdict, prompts, price_of(self.spec.backend), reports))

    def cheapest(self) -> tuple[list[int], Bias | None] | None:
        """Return the shortest prompt that may be as good as the tuned one, and its label bias.

        Returns None if prompt tokens have no price, or if it is the tuned prompt or "no prompt".
        """
        method = self.machine.method
        if not seeks_cheapest(self.spec) or not isinstance(method, PromptSearch):
            return None
        row, bias = method.cheapest(
            self.state.method, lambda row: self.vocabulary.length(row.tolist())
        )
        indices = row.tolist()
        bare = no_prompt(self.spec.task, self.vocabulary)
        if self.text_prompt(indices) in (self._deployable, bare):
            return None
        return indices, None if bias is None else tuple(bias.tolist())

    @property
    def _deployable(self) -> TextPrompt:
        return self.text_prompt(self.machine.method.prompt(self.state.method).tolist())

    def _verdict(self) -> messages.Verdict | None:
        state = self.state
        if state.verdict is not None:
            return self._with_text(state.verdict)
        if state.running or state.paused or state.metric.after is not None:
            return None
        why, cap = "the final prompt is not evaluated yet", state.account.cap
        if state.metric.no_prompt is None and state.metric.before is None:
            if state.evaluation.spent != NOTHING:
                return not_measured("no measurement on the dev rows succeeded (see the log)")
            why = "the server has no dev rows of this run (data.dev)"
        if cap is not None and any(unit != "queries" for unit, *_ in cap.pairs(NOTHING)):
            why += ", or the caps do not cover a measurement"
        return not_measured(why)

    def _with_text(self, verdict: messages.Verdict) -> messages.Verdict:
        state, priced = self.state, not self.counters.unpriced
        text = sentence(verdict, state.metric.name, state.account.spent, priced=priced)
        return verdict.model_copy(update={"text": text})


def reasons(cause: Exception | str) -> tuple[str, str | None]:
    """Return why a run pauses: the full reason for operators, and a summary for viewers."""
    if isinstance(cause, str):
        return cause, None
    if isinstance(cause, SpecError):
        return one_line("; ".join(cause.problems)), None
    summary = cause.summary if isinstance(cause, BackendError) else str(cause)
    return one_line(cause), one_line(summary)


# The export: the first line has the kind ``run``, and contains the run's description, candidates
# and untrained prompt. The lines of the run's log follow, oldest first. The last line has the kind
# ``result`` and the keys of a `RunResult`.


@contextmanager
def reading(run_id: str) -> Iterator[None]:
    """Turn errors of the ``with`` block, which reads a stored run, into a `SpecError`."""
    try:
        yield
    except (KeyError, RecursionError, TypeError, ValueError) as exc:
        reason = messages.first_error(exc) if isinstance(exc, ValidationError) else repr(exc)
        problem = f"run {run_id!r} is damaged, or from another version: {reason}"
        raise SpecError(problem, source="store") from exc


async def open_run(store: Store, run_id: str) -> RunView:
    """Return a run that this process does not serve; a `ResultError` if it is not in the store."""
    record = await store.run(run_id)
    if record is None:
        raise ResultError(f"there is no run {run_id!r} in the store")
    with reading(run_id):
        vocabulary = Vocabulary.parse(record.candidates)
        machine = RoundMachine.of(run_id, RunSpec.model_validate_json(record.spec), vocabulary)
        run = RunView(machine, vocabulary, SystemClock())
        await run.read(record, log_pages(store, run_id))
    return run


async def exported_run(store: Store, run_id: str) -> bytes:
    """Return the export of a run; a `ResultError` if the run is not in the store."""
    run = await open_run(store, run_id)
    return b"".join([piece async for piece in export_run(store, run)])


async def export_run(store: Store, run: RunView) -> AsyncIterator[bytes]:
    """Yield a run as JSON lines, at its current version."""
    result, version = run.result(), run.version
    untrained = run.prompt(run.machine.initial_state())
    # Yielded only with the first page, so that an unavailable store raises before any output.
    first_line = _export_line(
        kind="run",
        created_at=run.summary.created_at,
        spec=run.spec.model_dump(mode="json"),
        candidates=json.loads(run.vocabulary.dump()),
        untrained=untrained.model_dump(mode="json"),
    )
    async for page in log_pages(store, run.run_id):
        entries = [entry for entry in page if entry.version <= version]
        size = sum(len(entry.body) for entry in entries)
        yield first_line + await in_thread_if_large(size, _export_lines, entries)
        first_line = b""
    yield first_line + _export_line(kind="result", **result.model_dump(mode="json"))


def _export_lines(entries: Iterable[LogEntry]) -> bytes:
    return b"".join(_export_line(kind=entry.kind, **json.loads(entry.body)) for entry in entries)


def _export_line(**document: Any) -> bytes:
    return f"{json.dumps(document, ensure_ascii=False)}\n".encode()
