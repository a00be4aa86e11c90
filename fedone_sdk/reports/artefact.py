"""The prompt artefact, a JSON file with a tuned prompt and its provenance; and its predictions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError

import fedone_sdk
from fedone_sdk import backends
from fedone_sdk._values import Frozen
from fedone_sdk.backends import LLMBackend
from fedone_sdk.backends.chat import is_chat, messages_of
from fedone_sdk.budget import Usage
from fedone_sdk.errors import SpecError
from fedone_sdk.evaluation.intervals import interval
from fedone_sdk.losses import biased, predicted
from fedone_sdk.messages import Cap, MetricReport, PromptReport, RunStatus, Verdict, first_error
from fedone_sdk.messages.run import Billed
from fedone_sdk.reports.source import ReportedRun
from fedone_sdk.scores import SCORES
from fedone_sdk.task import Example, LogProbs, Part, Rendered, TaskSpec, form_of, render

_MAX_BYTES = 1 << 24

_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=0, le=2**53)]


class LedgerReport(Billed):
    """The caps and the costs of the run, as in `RunResult`."""

    cap: Cap
    spent: Usage
    leased: Usage
    evaluation: Usage


class ArtefactEvaluation(Frozen):
    """The measurement of the prompt.

    Attributes:
        interval: The metric's 95 % bootstrap interval over the examples; null for a custom metric.
        batch_size: Examples per query. It slightly affects the answers of quantised models.
    """

    metric: MetricReport
    examples: _Count | None = None
    interval: tuple[float, float] | None = None
    batch_size: Annotated[int, Field(ge=1, le=100_000)]
    verdict: Verdict | None = None


class PromptArtefact(Frozen):
    """A tuned prompt and its provenance. The same run gives the same artefact.

    Attributes:
        calibration: ``labels`` if the run fitted the label bias to the clients' labels.
        models: Model versions that the provider reported.
        alpha_sha256: Digest of alpha, the method's parameters.
        sha256: Digest of all other keys, as canonical JSON.
    """

    format: Literal["fedone-prompt"] = "fedone-prompt"
    version: Literal[1] = 1
    run_id: Annotated[str, Field(max_length=200)]
    name: Annotated[str, Field(max_length=200)]
    status: RunStatus
    rounds: _Count
    seed: _Count
    method: Annotated[str, Field(max_length=200)]
    prompt: PromptReport
    task: TaskSpec
    calibration: Literal["none", "labels"] = "none"
    model: str | None
    models: tuple[str, ...] = ()
    alpha_sha256: _Sha256
    ledger: LedgerReport
    evaluation: ArtefactEvaluation
    sdk_version: Annotated[str, Field(max_length=100)]
    sha256: str = ""

    @property
    def digest(self) -> str:
        """The expected value of `sha256`."""
        document = self.model_dump(mode="json", exclude={"sha256"})
        return hashlib.sha256(_canonical(document)).hexdigest()

    @property
    def tuned_task(self) -> TaskSpec:
        """The task with the prompt's label words and label bias."""
        task = self.task
        if self.prompt.labels is not None:
            task = task.with_labels(self.prompt.labels)
        return task if self.prompt.bias is None else task.with_bias(self.prompt.bias)

    def render(self, row: Example) -> str:
        """Return the model's input for a row as text; messages of a chat are joined.

        The mask is omitted.
        """
        return "".join(part.text for part in self._input(row) if part.kind != "role")

    def messages(self, row: Example) -> list[dict[str, str]]:
        """Return the model's input for a row as a chat; a template becomes the user's message."""
        parts = self._input(row)
        chat = parts if is_chat(parts) else (Part("role", "user"), *parts)
        return [{"role": one.role, "content": one.text} for one in messages_of(chat)]

    async def predict(
        self, row: Example, backend: LLMBackend, *, any_model: bool = False
    ) -> Prediction:
        """Return a model's answer to a row.

        Raises:
            SpecError: The prompt was tuned for another model, and `any_model` is false; or the task
                only scores given texts (loss ``nll``).
        """
        labelled = await label_examples(backend, self, [row], any_model=any_model)
        return labelled.predictions[0]

    def _input(self, row: Example) -> Rendered:
        return render(self.tuned_task, self.prompt.prompt, row)

    @property
    def functions(self) -> dict[str, Any]:
        """Names of the user's functions, by key of RUN.yaml. This class does not import them."""
        metric, score = self.task.metric, self.task.score
        scores = {score} if isinstance(score, str) else {*(score or ())}
        functions: dict[str, Any] = {}
        if scores - SCORES.keys():
            functions["task.score"] = score
        if ":" in metric:
            functions["task.metric"] = metric
        return functions

    def signed(self) -> Self:
        """Return a copy with its digest."""
        return self.model_copy(update={"sha256": self.digest})

    def dump(self) -> str:
        """Return the artefact as the contents of a file."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def artefact_of(run: ReportedRun) -> PromptArtefact:
    """Return the artefact of a run in its current state."""
    result, spec = run.result, run.spec
    after = run.outcomes.get("after")
    ends = after and interval(spec.task.metric, after, len(spec.task.labels))
    copied = ("run_id", "name", "status", "rounds", "seed", "prompt", "model", "models")
    return PromptArtefact(
        **{name: getattr(result, name) for name in copied},
        alpha_sha256=result.alpha_sha256,
        method=spec.method.label,
        task=spec.task,
        calibration=spec.calibration.kind,
        ledger=LedgerReport(**{name: getattr(result, name) for name in LedgerReport.model_fields}),
        evaluation=ArtefactEvaluation(
            metric=result.metric,
            examples=None if after is None else len(after.targets or after.losses),
            interval=ends and (ends.low, ends.high),
            batch_size=spec.method.batch_size,
            verdict=result.verdict,
        ),
        sdk_version=fedone_sdk.__version__,
    ).signed()


def load_prompt(path: str | Path) -> PromptArtefact:
    """Read a tuned prompt from the file of its artefact.

    Example:
        ```python
        prompt = load_prompt("sst2.prompt.json")
        async with LlamaCppBackend("smollm2-135m-instruct") as backend:
            print((await prompt.predict({"sentence": "What a film."}, backend)).label)
        ```

    Raises:
        SpecError: The file is not an artefact, has a newer version, or was modified.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        document = json.loads(data)
    except OSError as exc:
        raise SpecError(exc.strerror or str(exc), source=str(path)) from exc
    except (ValueError, RecursionError) as exc:
        raise SpecError("is not JSON", source=str(path)) from exc
    if not isinstance(document, dict) or document.get("format") != "fedone-prompt":
        raise SpecError("is not a prompt artefact", source=str(path))
    sha256 = document.pop("sha256", None)
    if sha256 != hashlib.sha256(_canonical(document)).hexdigest():
        raise SpecError("sha256: differs from the contents; the file was changed", source=str(path))
    try:
        artefact = PromptArtefact.model_validate_json(json.dumps({**document, "sha256": sha256}))
        artefact.tuned_task  # noqa: B018 - checks labels and bias
        return artefact
    except ValidationError as exc:
        raise SpecError(first_error(exc), source=str(path)) from exc
    except ValueError as exc:
        raise SpecError(f"prompt.{exc}", source=str(path)) from exc


def _canonical(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return text.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A model's answer to a row.

    Attributes:
        label: The likeliest label; None if the model wrote no label word, or failed.
        scores: Log-probability of each label with the label bias, nats; None without labels, or if
            the model failed.
        text: The generated text; None for a task with labels.
    """

    label: str | None = None
    scores: dict[str, float] | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Labelled:
    """A model's answers to rows, in their order, and what the answers cost."""

    predictions: Sequence[Prediction]
    usage: Usage


async def label_examples(
    backend: LLMBackend,
    artefact: PromptArtefact,
    examples: Sequence[Example],
    *,
    any_model: bool = False,
) -> Labelled:
    """Return a model's answers to rows, like `PromptArtefact.predict`."""
    task, prompt = artefact.tuned_task, artefact.prompt.prompt
    if task.loss == "nll":
        raise SpecError("task.loss: nll scores a text that is given; there is nothing to predict")
    await backend.check(task.label_words, form_of(task, prompt))
    if not any_model and artefact.model not in (None, backend.fingerprint):
        raise SpecError(
            f"model: is {backend.fingerprint!r}, but the prompt was tuned for {artefact.model!r}"
        )
    size = artefact.evaluation.batch_size
    batches = [examples[at : at + size] for at in range(0, len(examples), size)]
    queries = [backends.query_for(task, prompt, batch, backend=backend) for batch in batches]
    answers = await backends.score_all(backend, queries)
    pairs = zip(queries, answers, strict=True)
    rows = [row for query, answer in pairs for row in backends.rows_of(query, answer)]
    usage = (answer.usage.without_queries() for answer in answers)
    return Labelled(
        [_prediction(task, row) for row in rows], sum(usage, Usage(queries=len(queries)))
    )


def _prediction(task: TaskSpec, row: LogProbs | str | None) -> Prediction:
    if row is None or isinstance(row, str):
        return Prediction(text=row)
    labels, index = list(task.labels), predicted(task, row)
    scores = dict(zip(labels, biased(task, row), strict=True))
    return Prediction(label=labels[index] if index >= 0 else None, scores=scores)
