"""Runs as JSON: entries of lists, results, and the requests that change a run."""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, WithJsonSchema, field_serializer, model_validator

from fedone_sdk.budget import NOTHING, Budget, Usage
from fedone_sdk.messages.base import ONE_LINE, Message, is_none
from fedone_sdk.messages.prompt_report import Compared, PromptReport, Standing, Verdict
from fedone_sdk.spec import RunName

RunStatus = Literal["running", "completed", "budget_exhausted", "stopped", "failed"]

_ACCOUNTS = ("spent", "leased", "evaluation")
_COUNTS = ("queries", "requests", "prompt_tokens", "completion_tokens")

# A dict, because pydantic 2.14 cannot build a message with several fields of one nested model.
Bill = Annotated[
    dict[str, int | float | None],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                **{name: {"type": "integer", "minimum": 0} for name in _COUNTS},
                "usd": {"anyOf": [{"type": "number", "minimum": 0}, {"type": "null"}]},
            },
            "required": [*_COUNTS, "usd"],
            "additionalProperties": False,
        }
    ),
]
"""An amount in the five units of `Usage`, as JSON; `usd` is null if a price is unknown."""


def bill(usage: Usage, *, priced: bool) -> Bill:
    """Return an amount as JSON values."""
    amounts = usage.model_dump(mode="json")
    return amounts if priced else {**amounts, "usd": None}


class Billed(Message):
    """A message with amounts, whose `usd` is null in JSON if a price is unknown.

    Attributes:
        priced: Whether all prices are known; otherwise `Usage.usd` is incomplete.
    """

    priced: bool = Field(default=True, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _read_unknown(cls, document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        bills = {name: b for name in _ACCOUNTS if isinstance(b := document.get(name), dict)}
        if all(amounts.get("usd", 0) is not None for amounts in bills.values()):
            return document
        # If one price is unknown, all sums of the message are unknown, as in `_bill`.
        unknown = {name: {**amounts, "usd": 0} for name, amounts in bills.items()}
        return {**document, **unknown, "priced": False}

    @field_serializer(*_ACCOUNTS, when_used="json", check_fields=False)
    def _bill(self, value: Usage) -> Bill:
        return bill(value, priced=self.priced)


class Cap(Message):
    """The caps of a run; null is unlimited. Unlike a `Budget`, it may have no cap at all."""

    queries: int | None = None
    requests: int | None = None
    tokens: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    usd: float | None = None

    @classmethod
    def of(cls, budget: Budget | None) -> Cap:
        """Return the caps of a budget, if any."""
        return cls() if budget is None else cls.model_validate(budget.model_dump(mode="json"))


class Traffic(Message):
    """Sizes of HTTP bodies on the wire. An upload goes from a client to the server.

    Attributes:
        upload_bytes: Total size of request bodies.
        download_bytes: Total size of response bodies.
        messages: Number of non-empty bodies.
    """

    upload_bytes: int = 0
    download_bytes: int = 0
    messages: int = 0

    def plus(self, upload: int, download: int) -> Traffic:
        """Return the traffic with one more request and response."""
        messages = bool(upload) + bool(download)
        return self.sum(Traffic(upload_bytes=upload, download_bytes=download, messages=messages))

    def sum(self, other: Traffic) -> Traffic:
        """Return the sum."""
        return Traffic(
            upload_bytes=self.upload_bytes + other.upload_bytes,
            download_bytes=self.download_bytes + other.download_bytes,
            messages=self.messages + other.messages,
        )


class CacheReport(Message):
    """Inputs answered from a cache."""

    hits: int = 0


class CensoringReport(Message):
    """Label log-probabilities that the provider's API did not return.

    Attributes:
        values: Number of label log-probabilities in all answers.
        censored: How many of them are only upper bounds, because the API did not return them.
    """

    values: int = 0
    censored: int = 0


class MetricReport(Message):
    """The metric on the dev split; null if not measured.

    Attributes:
        no_prompt_biased: Metric of "no prompt" with a label bias fitted to it; absent without one.
        before: Metric of the untrained prompt.
        after: Metric of the deployable prompt.
    """

    name: str
    no_prompt: float | None = None
    no_prompt_biased: float | None = Field(default=None, exclude_if=is_none)
    before: float | None = None
    after: float | None = None

    @property
    def standings(self) -> tuple[Standing, ...]:
        """The metrics as measurements without intervals."""
        values: dict[Compared, float | None] = {"no_prompt": self.no_prompt}
        if self.no_prompt_biased is not None:
            values["no_prompt_biased"] = self.no_prompt_biased
        values |= {"untrained": self.before, "tuned": self.after}
        return tuple(Standing(name=name, value=value) for name, value in values.items())

    @property
    def baseline(self) -> float | None:
        """The better of "no prompt" with and without a label bias fitted to it."""
        values = [each for each in (self.no_prompt_biased, self.no_prompt) if each is not None]
        if ":" in self.name:  # A user's metric, whose better direction is not known.
            return values[0] if values else None
        return min(values, default=None) if self.name == "loss" else max(values, default=None)


class RoundReport(Message):
    """One finished round.

    Attributes:
        client_id: Ids of the round's clients, joined by commas.
        mean_loss: Mean over the round's scored prompts.
        metric: Metric of the deployable prompt after this round, if evaluated.
    """

    round: int
    client_id: str
    queries: int
    mean_loss: float
    metric: float | None = None


class PrivacyReport(Message):
    """Privacy loss of the device with the most releases. A release is one noised result.

    Attributes:
        target: The noised values: ``losses`` or ``alpha``.
        unit: Protected unit: one ``example``, or all data of a ``device``.
        epsilon: Epsilon of this device in the run, over all its releases.
        clients: Number of devices with releases.
        spent_up: Number of devices that have reached ``max_epsilon``.
    """

    target: Literal["losses", "alpha"]
    unit: Literal["example", "device"]
    epsilon: float
    delta: float
    releases: int
    clients: int
    spent_up: int


class ClientInfluence(Message):
    """Influence of one client on a run.

    Attributes:
        rounds: Number of the client's updates that the defences examined.
        scaled: Number of the client's updates whose step of alpha was shortened.
        movement: Sum of the norms of the client's accepted steps of alpha.
        share: The client's share of the movement of all clients.
        outliers: Number of the client's updates that were rejected as outliers.
        score: Mean difference of the client's updates from the run's typical update, in robust
            standard deviations. Near 0 is normal; -3 is suspicious.
        loss_residual: Mean difference of the client's losses from the run's median.
        epsilon: Epsilon of the client; null in runs without noise.
    """

    client_id: str = ""
    rounds: int = 0
    movement: float = 0.0
    share: float = 0.0
    scaled: int = 0
    outliers: int = 0
    score: float = 0.0
    loss_residual: float = 0.0
    quarantined: bool = False
    releases: int = 0
    epsilon: float | None = None


class ProposerReport(Message):
    """Calls of a run's proposer (a model that writes new candidates), and their results.

    Attributes:
        calls: Number of calls, including failed ones.
        added: Number of candidates that were added to the run.
        dropped: Number of texts that were not new or cannot be candidates.
        failure: Why the last call failed; for operators only.
        spent: The proposer's part of the run's `evaluation`.
    """

    calls: int = 0
    failed: int = 0
    added: int = 0
    dropped: int = 0
    failure: str | None = None
    spent: Usage = NOTHING

    def and_then(self, *, spent: Usage = NOTHING, failure: str | None = None, **more: int) -> Self:
        """Return this report with further numbers added."""
        numbers = {name: getattr(self, name) + number for name, number in more.items()}
        return self.model_copy(
            update={**numbers, "spent": self.spent + spent, "failure": failure or self.failure}
        )


class UnfitDevices(Message):
    """Number of connected devices that are unfit for a run for one reason."""

    reason: str
    devices: int


class RunDevices(Message):
    """The devices available to a run.

    Attributes:
        connected: Number of devices that may access the run, and wait for work or are working.
        fit: Number of connected devices that have not declined the run's work as unfit.
        unfit: Why connected devices are unfit, most frequent reason first; for operators only.
    """

    connected: int
    fit: int
    unfit: tuple[UnfitDevices, ...] = ()


class Written(Message):
    """A candidate that a device wrote, or that the run's model merged from others.

    Attributes:
        client: Enrolment index of the candidate's author; None if the candidate is merged.
        parents: The text that the candidate improves, or the texts that it merges.
        depth: Number of ancestors that are written candidates too, counting only first parents.
        gain: Mean loss of the scored prompts that contain the best parent, minus that of the scored
            prompts that contain the candidate; None until both have been scored.
        won: Whether the deployable prompt contains the candidate.
    """

    text: str
    client: int | None
    parents: tuple[str, ...]
    depth: int
    gain: float | None = None
    won: bool

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """Cells of a table: text (indented by depth), author, gain, whether it won, parents."""
        return (
            f"{2 * self.depth * ' '}{self.text}",
            "merged" if self.client is None else str(self.client),
            "-" if self.gain is None else f"{self.gain:+.3f}",
            "yes" if self.won else "",
            " + ".join(parent or "(blank)" for parent in self.parents),
        )


class RunResult(Billed):
    """The current or final result of a run.

    Attributes:
        status: ``running``, or how the run ended.
        reason: Reason for the status; texts of providers and devices are for operators only.
        spent: Usage of training and evaluation, including the requests that open work has sent so
            far. `queries` counts only training.
        leased: Additional usage that is reserved for open work.
        evaluation: Usage of evaluation; its `queries` are not part of `spent`.
        proposer: Calls of ``prompt.proposer``; absent before the first one.
        lineage: The candidates that devices wrote or the run's model merged, each below its first
            parent.
        judge: The part of `evaluation` for the judge of ``task.score``; absent without a judge.
        communication: Traffic of all requests except calls of the gateway, which are in `gateway`.
        verdict: Whether tuning improved the metric; absent while the run is running.
        model: Fingerprint of the model that scored, once known.
        models: Model names that the provider reported.
        devices: Available devices while the run is running.
        wall_s: Seconds from the first assignment to the end (or now).
    """

    run_id: str
    name: str
    status: RunStatus
    reason: str | None = None
    rounds: int
    cap: Cap
    spent: Usage
    leased: Usage
    cache: CacheReport
    censoring: CensoringReport = CensoringReport()
    evaluation: Usage
    proposer: ProposerReport | None = Field(default=None, exclude_if=is_none)
    lineage: tuple[Written, ...] = Field(default=(), exclude_if=operator.not_)
    judge: Usage | None = Field(default=None, exclude_if=is_none)
    communication: Traffic
    gateway: Traffic
    metric: MetricReport
    verdict: Verdict | None = Field(default=None, exclude_if=is_none)
    history: tuple[RoundReport, ...]
    prompt: PromptReport
    alpha_sha256: str
    model: str | None
    models: tuple[str, ...] = ()
    privacy: PrivacyReport | None = None
    quarantined: int = 0
    devices: RunDevices | None = Field(default=None, exclude_if=is_none)
    wall_s: float
    seed: int

    @property
    def standings(self) -> tuple[Standing, ...]:
        """The measurements on the dev split, from the verdict if it has some, or from `metric`."""
        if self.verdict is not None and self.verdict.standings:
            return self.verdict.standings
        return self.metric.standings


RunEvent = RoundReport | RunResult
"""An event of a run: a finished round (sent again if its metric is measured), or the result."""


Reason = Annotated[str, Field(min_length=1, max_length=500), ONE_LINE]
"""A reason for the log."""


class RollBack(Message):
    """``POST /v1/runs/{id}/rollback``: roll a run back to an earlier round.

    Attributes:
        to_round: The round to repeat first; this round and later ones are discarded.
    """

    to_round: Annotated[int, Field(ge=0, le=2**31)]
    reason: Reason


class Quarantine(Message):
    """``POST /v1/runs/{id}/clients/{client_id}/quarantine``: exclude a client from a run."""

    reason: Reason


class RunEntry(Message):
    """An entry of ``GET /v1/runs`` for devices.

    Attributes:
        status: ``running``, or how the run ended.
        round: Number of rounds done.
    """

    run_id: RunName
    status: RunStatus
    round: int
    rounds: int


class RunSummary(RunEntry, Billed):
    """An entry of ``GET /v1/runs`` for people.

    Attributes:
        spent: Usage of training and evaluation; `queries` counts only training.
        ended_at: Time of the end or pause, seconds since the epoch; null while the run is running.
        metric: Newest value of the metric on the dev split; null if not measured.
        active_at: Time of the last update since the server started, seconds since the epoch; null
            if there was no update.
        devices: Available devices while the run is running, without reasons.
    """

    cap: Cap
    spent: Usage
    created_at: float | None = None
    ended_at: float | None = None
    metric: float | None = Field(default=None, exclude_if=is_none)
    metric_name: str | None = Field(default=None, exclude_if=is_none)
    active_at: float | None = Field(default=None, exclude_if=is_none)
    devices: RunDevices | None = Field(default=None, exclude_if=is_none)

    @property
    def entry(self) -> RunEntry:
        """The part that devices read."""
        return RunEntry(**{name: getattr(self, name) for name in RunEntry.model_fields})


class Removal(Message):
    """``DELETE /v1/runs/{id}``: the deleted run, or the run that would be deleted.

    Attributes:
        spent: Usage of training and evaluation; `queries` counts only training.
        deleted: False for a dry run.
    """

    run_id: RunName
    status: RunStatus
    spent: Usage
    ended_at: float | None = None
    deleted: bool
