"""A run, told to people and programs: the result JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from fedone_sdk.budget import Budget, Usage
from fedone_sdk.candidates import prompt_of
from fedone_sdk.messages.base import Message
from fedone_sdk.messages.bill import Billed
from fedone_sdk.messages.verdict import Standing, Verdict
from fedone_sdk.task import Filling, TaskSpec, TextPrompt
from fedone_sdk.vocabulary import LABELS, Vocabulary

__all__ = [
    "CacheReport",
    "Cap",
    "CensoringReport",
    "ClientInfluence",
    "MetricReport",
    "PrivacyReport",
    "PromptReport",
    "RoundReport",
    "RunDevices",
    "RunEvent",
    "RunResult",
    "RunStatus",
    "Traffic",
    "UnfitDevices",
]

RunStatus = Literal["running", "completed", "budget_exhausted", "stopped", "failed"]


def _is_none(value: object) -> bool:
    return value is None


class Cap(Message):
    """The caps of a run; null means none.

    `Budget` demands at least one cap, a report does not.
    """

    queries: int | None = None
    requests: int | None = None
    tokens: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    usd: float | None = None

    @classmethod
    def of(cls, budget: Budget | None) -> Cap:
        """The caps of a budget, or none."""
        return cls() if budget is None else cls.model_validate(budget.model_dump(mode="json"))


class Traffic(Message):
    """HTTP bodies as sent, seen from the clients.

    Attributes:
        upload_bytes: Request bodies.
        download_bytes: Response bodies.
        messages: Bodies that were not empty.
    """

    upload_bytes: int = 0
    download_bytes: int = 0
    messages: int = 0

    def plus(self, upload: int, download: int) -> Traffic:
        """With one more exchange of bodies."""
        return Traffic(
            upload_bytes=self.upload_bytes + upload,
            download_bytes=self.download_bytes + download,
            messages=self.messages + bool(upload) + bool(download),
        )

    def sum(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(
            upload_bytes=self.upload_bytes + other.upload_bytes,
            download_bytes=self.download_bytes + other.download_bytes,
            messages=self.messages + other.messages,
        )


class CacheReport(Message):
    """Queries that were answered without asking the model."""

    hits: int = 0


class CensoringReport(Message):
    """Log-probabilities of labels that a provider's interface did not show.

    Attributes:
        values: Log-probabilities that were scored.
        censored: How many of them are only upper bounds.
    """

    values: int = 0
    censored: int = 0


class MetricReport(Message):
    """The metric on the dev split; null where nobody measured it.

    Attributes:
        name: Which metric.
        no_prompt: Without any prompt.
        before: Of the untrained prompt.
        after: Of the deployable prompt.
    """

    name: str
    no_prompt: float | None = None
    before: float | None = None
    after: float | None = None


class RoundReport(Message):
    """One finished round.

    Attributes:
        round: From 0.
        client_id: Who did the work (ids joined by commas where there were several).
        queries: Training queries that the round spent.
        mean_loss: Over the round's scored prompts.
        metric: Of the deployable prompt after this round, where it was evaluated.
    """

    round: int
    client_id: str
    queries: int
    mean_loss: float
    metric: float | None = None


class PromptReport(Message):
    """The deployable prompt.

    Attributes:
        text: Its text; empty for a soft prompt, whose vectors are a resource of their own. Of a
            prompt of slots, their texts in order.
        tokens: The candidates that it is made of, position by position.
        bias: What is to be added to the label words' log-probabilities under this prompt, one
            number per label, nats (`TaskSpec.bias`); null is nothing.
        slots: What each slot holds, with label words in the place of their placeholders; absent
            without slots.
        labels: The label words that the prompt chooses, by label; absent where it chooses none.
    """

    text: str
    tokens: tuple[str, ...]
    bias: tuple[float, ...] | None = None
    slots: dict[str, str] | None = Field(default=None, exclude_if=_is_none)
    labels: dict[str, str] | None = Field(default=None, exclude_if=_is_none)

    @classmethod
    def of(
        cls,
        task: TaskSpec,
        vocabulary: Vocabulary,
        indices: Sequence[int],
        bias: tuple[float, ...] | None,
    ) -> PromptReport:
        """The report of a prompt of candidates."""
        prompt = prompt_of(task, vocabulary, indices)
        tokens = tuple(vocabulary.tokens(indices))
        if isinstance(prompt, str):
            return cls(text=prompt, tokens=tokens, bias=bias)
        names = [slot.name for slot in vocabulary.slots if slot.name != LABELS]
        words = dict(zip(task.labels, prompt.labels, strict=True)) if prompt.labels else None
        return cls(
            text=prompt.text,
            tokens=tokens,
            bias=bias,
            slots=dict(zip(names, prompt.texts, strict=True)),
            labels=words,
        )

    @property
    def prompt(self) -> TextPrompt:
        """As a task takes it."""
        if self.slots is None:
            return self.text
        return Filling(tuple(self.slots.values()), tuple((self.labels or {}).values()))


class PrivacyReport(Message):
    """What devices' noise has cost the device that gave away most.

    Attributes:
        target: What is noised.
        unit: What is protected: one ``example``, or all that a ``device`` holds.
        epsilon: Of that device so far, over all its releases in this run.
        delta: At which.
        releases: How often it was asked for noised numbers.
        clients: Devices that were asked at all.
        spent_up: Devices that get no more work, because it would pass ``max_epsilon``.
    """

    target: Literal["losses", "alpha"]
    unit: Literal["example", "device"]
    epsilon: float
    delta: float
    releases: int
    clients: int
    spent_up: int


class ClientInfluence(Message):
    """What one client has done to a run.

    Attributes:
        client_id: Which.
        rounds: Its accepted updates that the defences looked at.
        movement: The sum of its steps' norms, as far as they counted.
        share: Of the movement of all clients.
        scaled: Steps that were scaled down.
        outliers: Updates that were held back.
        score: Mean agreement with the run in robust standard deviations; negative disagrees.
        loss_residual: Mean difference of its losses from the run's median.
        quarantined: Whether it gets no more work.
        releases: How often it was asked for noised numbers.
        epsilon: What they have cost it; null where no noise is asked for.
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


class UnfitDevices(Message):
    """Devices that do not fit a run for the same reason.

    Attributes:
        reason: Why, in the devices' words.
        devices: How many of those that are connected.
    """

    reason: str
    devices: int


class RunDevices(Message):
    """The devices that a run could draw from.

    Attributes:
        connected: Devices that ask for work and may work for the run, with those that are at work.
        fit: How many of them have not said that they do not fit.
        unfit: Why the others do not, most frequent first; for operators only.
    """

    connected: int
    fit: int
    unfit: tuple[UnfitDevices, ...] = ()


class RunResult(Billed):
    """Where a run stands, or how it ended.

    Attributes:
        run_id: The run.
        name: What its RunSpec calls it.
        status: ``running`` or how it ended.
        reason: Why, where the status alone does not say. Devices get none; of a pause, what the
            model's provider said and where it was asked is for operators only.
        rounds: Rounds that ran.
        cap: The caps.
        spent: What was spent, training and evaluation (`queries`: training only).
        leased: What is reserved for work under way.
        cache: Answers that cost nothing.
        censoring: Label log-probabilities that the model's interface did not show.
        evaluation: What of it evaluation spent; its `queries` are apart from training's.
        communication: Federated messages.
        gateway: Scoring through the gateway, apart.
        metric: On the dev split.
        verdict: Whether tuning was worth it; absent while the run goes on, and where an earlier
            version has measured it.
        history: One entry per round.
        prompt: The deployable prompt.
        alpha_sha256: Digest of alpha's bytes.
        model: Fingerprint of the model that scored, once known.
        models: What the provider called the models that answered.
        privacy: What devices' noise has cost; null where none is asked for.
        quarantined: Clients that get no work.
        devices: Who could be drawn, while the run is running; not for devices.
        wall_s: Seconds from the first assignment to the end (or now).
        seed: The run's seed.
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
    communication: Traffic
    gateway: Traffic
    metric: MetricReport
    verdict: Verdict | None = Field(default=None, exclude_if=_is_none)
    history: tuple[RoundReport, ...]
    prompt: PromptReport
    alpha_sha256: str
    model: str | None
    models: tuple[str, ...] = ()
    privacy: PrivacyReport | None = None
    quarantined: int = 0
    devices: RunDevices | None = Field(default=None, exclude_if=_is_none)
    wall_s: float
    seed: int

    @property
    def standings(self) -> tuple[Standing, ...]:
        """What was measured on the dev split: the verdict's, or without one `metric` alone."""
        if self.verdict is not None and self.verdict.standings:
            return self.verdict.standings
        metric = self.metric
        return (
            Standing(name="no_prompt", value=metric.no_prompt),
            Standing(name="untrained", value=metric.before),
            Standing(name="tuned", value=metric.after),
        )


RunEvent = RoundReport | RunResult
"""An event of a run: a finished round, repeated once its metric is known; last, the result."""
