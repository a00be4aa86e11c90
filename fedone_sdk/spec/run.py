"""RunSpec: everything that defines a run, as RUN.yaml says it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedone_sdk.budget import Budget
from fedone_sdk.errors import MissingExtraError, SpecError
from fedone_sdk.task import TaskSpec, glue_task
from fedone_sdk.vocabulary import VocabularySpec

__all__ = [
    "BackendSpec",
    "BdplSpec",
    "DataSpec",
    "DirichletSpec",
    "EvaluationSpec",
    "EvolutionSpec",
    "GsBdplSpec",
    "IidSpec",
    "MethodSpec",
    "OnnxSpec",
    "ParticipationSpec",
    "PromptSpec",
    "RunName",
    "RunSpec",
    "Spec",
    "load_yaml",
    "validate_spec",
]

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
"""What a run is called, in specs, messages and paths."""

_Count = Annotated[int, Field(ge=1, le=10**9)]
_Rate = Annotated[float, Field(gt=0, le=1e6)]


class Spec(BaseModel):
    """Base of all descriptions that people write: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class IidSpec(Spec):
    """Clients draw from the same distribution."""

    kind: Literal["iid"] = "iid"


class DirichletSpec(Spec):
    """Label proportions differ between clients: Dirichlet(alpha); small alpha is uneven."""

    kind: Literal["dirichlet"]
    alpha: Annotated[float, Field(gt=0, le=1e6)]


class DataSpec(Spec):
    """Where examples come from and how they are spread over clients.

    Attributes:
        train: Training file, or ``hf:NAME``.
        dev: Held-out file, or ``hf:NAME``; only evaluation sees it.
        num_clients: K.
        shots: Examples per class and client; null spreads all of them.
        partition: How the classes spread over clients.
    """

    train: str
    dev: str | None = None
    num_clients: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    shots: Annotated[int, Field(ge=1, le=100_000)] | None = None
    partition: Annotated[IidSpec | DirichletSpec, Field(discriminator="kind")] = IidSpec()


class PromptSpec(Spec):
    """The prompt that is tuned.

    Attributes:
        length: n, positions.
        vocabulary: Where the N candidates come from.
    """

    length: Annotated[int, Field(ge=1, le=1000)] = 20
    vocabulary: VocabularySpec


class _MethodSpec(Spec):
    num_samples: Annotated[int, Field(ge=2, le=65536)] = 20
    local_steps: Annotated[int, Field(ge=1, le=1024)] = 1
    batch_size: Annotated[int, Field(ge=1, le=1024)] = 32


class GsBdplSpec(_MethodSpec):
    """Gumbel-Softmax black-box discrete prompt learning, the paper's method.

    Attributes:
        num_samples: I, prompts per local step.
        local_steps: E.
        batch_size: B, examples per mini-batch.
        tau: Gumbel-Softmax temperature.
        optimizer: Of the local step; AdamW state is per client.
        learning_rate: Of the local step.
        weight_decay: Of AdamW; null means its default, 0.01.
        alpha_init: Start of every entry; null means 1/N.
        alpha_min: Floor of every entry.
    """

    name: Literal["gs-bdpl"] = "gs-bdpl"
    tau: Annotated[float, Field(gt=0, le=100)] = 0.1
    optimizer: Literal["sgd", "adamw"] = "adamw"
    learning_rate: _Rate = 3e-4
    weight_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    alpha_init: Annotated[float, Field(gt=0, le=1e6)] | None = None
    alpha_min: Annotated[float, Field(gt=0, le=1)] = 1e-5


class BdplSpec(_MethodSpec):
    """Black-box discrete prompt learning on the simplex (Diao et al. 2022).

    Attributes:
        num_samples: I, prompts per local step.
        local_steps: E.
        batch_size: B, examples per mini-batch.
        estimator: Which score function.
        optimizer: Of the local step; AdamW state is per client.
        learning_rate: Of the local step.
        weight_decay: Of AdamW; null means its default, 0.01.
        alpha_min: Floor of every probability.
    """

    name: Literal["bdpl"]
    estimator: Literal["negative", "zero", "normalize"] = "zero"
    optimizer: Literal["sgd", "adamw"] = "adamw"
    learning_rate: _Rate = 3e-4
    weight_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    alpha_min: Annotated[float, Field(gt=0, le=1)] = 1e-5


class EvolutionSpec(_MethodSpec):
    """A population of prompts: elite, crossover, mutation, leaders evaluated again.

    Attributes:
        num_samples: I, prompts per local step.
        local_steps: E.
        batch_size: B, examples per mini-batch.
        elite: How many of the best prompts have children.
        mutation_rate: Per position; null means 1/n.
        pool_size: How many prompts are remembered.
    """

    name: Literal["evolution"]
    elite: Annotated[int, Field(ge=1, le=1000)] = 8
    mutation_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    pool_size: Annotated[int, Field(ge=1, le=10_000)] = 64


MethodSpec = Annotated[GsBdplSpec | BdplSpec | EvolutionSpec, Field(discriminator="name")]


class ParticipationSpec(Spec):
    """Who works in a round, and how.

    Attributes:
        clients_per_round: K*; 1 is the paper's query-optimal choice, more is FedAvg.
        exchange: What travels: ``alpha`` (the paper's) or ``losses``.
        selection: ``uniform`` without replacement, or ``proportional`` to examples held, with
            replacement (the paper's proof).
        aggregation: Mean of the clients' alpha, weighted by ``examples`` held or ``plain``.
        server_optimizer: ``none`` takes the mean; ``adamw`` treats alpha minus the mean as a
            gradient and keeps its state on the server (FedOpt).
        server_learning_rate: Of the server optimiser.
        min_clients: Enrolled clients before the first round starts.
        deadline_s: Seconds until a silent client loses its seat.
        claim_timeout_s: Seconds that a chosen client has to come for its work.
        max_lost: Assignments in a row that may come to nothing before the run ends as failed.
        trusted_clients: Whether the usage that clients with a model of their own report is
            believed, so that their unused lease is given back.
    """

    clients_per_round: Annotated[int, Field(ge=1, le=10_000)] = 1
    exchange: Literal["alpha", "losses"] = "alpha"
    selection: Literal["uniform", "proportional"] = "uniform"
    aggregation: Literal["examples", "plain"] = "examples"
    server_optimizer: Literal["none", "adamw"] = "none"
    server_learning_rate: _Rate = 1e-2
    min_clients: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    claim_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 10.0
    max_lost: Annotated[int, Field(ge=1)] = 50
    trusted_clients: bool = False


class EvaluationSpec(Spec):
    """How the deployable prompt is measured on the dev split.

    Attributes:
        every: Rounds between measurements for the curve; 0 measures only the ends.
        examples: Dev examples per measurement of the curve; the ends use the whole split.
        queries: Cap on evaluation's own queries.
    """

    every: Annotated[int, Field(ge=0)] = 10
    examples: _Count = 256
    queries: _Count | None = None


class OnnxSpec(Spec):
    """A masked language model run by onnxruntime.

    Attributes:
        model: Folder with ``model.int8.onnx`` or ``model.onnx`` and ``tokenizer.json``; null is
            the model that comes with the SDK.
        threads: Queries scored at once; null picks by the machine.
    """

    kind: Literal["onnx"] = "onnx"
    model: str | None = None
    threads: Annotated[int, Field(ge=1, le=256)] | None = None


# Further kinds join here as a union that `kind` discriminates.
BackendSpec = OnnxSpec


class RunSpec(Spec):
    """One tuning run.

    Attributes:
        name: What people call it.
        task: Template, label words, loss, metric; or a built-in name such as ``sst2``.
        data: Where examples come from; absent when clients bring their own (`fedone serve`).
        prompt: Length and vocabulary.
        method: The black-box method.
        participation: Who works in a round.
        budget: Caps.
        rounds: T.
        evaluation: How progress is measured.
        backend: The language model.
        seed: All random streams derive from it.
    """

    name: RunName = "run"
    task: TaskSpec
    data: DataSpec | None = None
    prompt: PromptSpec
    method: MethodSpec = GsBdplSpec()
    participation: ParticipationSpec = ParticipationSpec()
    budget: Budget | None = None
    rounds: Annotated[int, Field(ge=1, le=10_000_000)] = 100
    evaluation: EvaluationSpec = EvaluationSpec()
    backend: BackendSpec = OnnxSpec()
    seed: Annotated[int, Field(ge=0, lt=2**53)] = 0

    @field_validator("task", mode="before")
    @classmethod
    def _name_to_task(cls, value: object) -> object:
        if isinstance(value, str):
            name, _, style = value.partition("/")
            return glue_task(name, style or "roberta")  # type: ignore[arg-type]
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        clients = self.data.num_clients if self.data else None
        if (
            clients is not None
            and self.participation.clients_per_round > clients
            and self.participation.selection == "uniform"
        ):
            raise ValueError(
                f"participation.clients_per_round: {self.participation.clients_per_round} is more "
                f"than data.num_clients ({clients})"
            )
        if isinstance(self.method, EvolutionSpec):
            self._check_evolution()
        return self

    def _check_evolution(self) -> None:
        part = self.participation
        if part.server_optimizer != "none":
            raise ValueError("participation.server_optimizer: must be none for evolution")
        alone = part.clients_per_round == 1
        if not alone and (part.exchange == "alpha" or self.method.local_steps > 1):
            raise ValueError(
                "participation.clients_per_round: evolution takes more than 1 only with exchange "
                "losses and one local step (pools cannot be averaged)"
            )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a RUN.yaml.

        Raises:
            SpecError: One line per mistake: file, key, what is allowed.
        """
        return validate_spec(cls, load_yaml(path), source=str(path))


SpecT = TypeVar("SpecT", bound=BaseModel)


def validate_spec(model: type[SpecT], value: object, *, source: str) -> SpecT:
    """Validates a mapping, with errors that a person can act on.

    Raises:
        SpecError: One line per mistake: source, key, what is allowed.
    """
    try:
        return model.model_validate(value)
    except ValidationError as exc:
        raise SpecError(list(_problems(exc, model)), source=source) from None


def load_yaml(path: str | Path) -> Any:
    """Reads a YAML file; a key that stands twice is an error, not the last one's win.

    Raises:
        SpecError: The file is missing or no YAML.
        MissingExtraError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as exc:
        raise MissingExtraError("reading YAML", extra="cli") from exc

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    line = node.start_mark.line + 1
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key!r} stands twice in the block at line {line}"
                    )
            return super().construct_mapping(node, deep)

    try:
        text = Path(path).read_text(encoding="utf-8")
        return yaml.load(text, Loader)
    except OSError as exc:
        raise SpecError(f"cannot be read: {exc.strerror}", source=str(path)) from exc
    except UnicodeDecodeError as exc:
        raise SpecError("is not UTF-8 text", source=str(path)) from exc
    except yaml.YAMLError as exc:
        raise SpecError(f"is not YAML: {' '.join(str(exc).split())}", source=str(path)) from exc


def _problems(error: ValidationError, model: type[BaseModel]) -> Iterator[str]:
    tags = _tags(model)
    for item in error.errors(include_url=False):
        key = ".".join(str(step) for step in item["loc"] if step not in tags)
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            allowed = ", ".join(sorted(_siblings(model, item["loc"], tags)))
            message = f"unknown key (allowed: {allowed})" if allowed else "unknown key"
        elif item["type"] == "missing":
            message = "is required"
        elif item["type"] in ("union_tag_invalid", "union_tag_not_found"):
            context = item.get("ctx", {})
            message = "is required"
            if "tag" in context:
                message = f"{context['tag']!r} is not one of {context.get('expected_tags')}"
            key = f"{key}.{str(context.get('discriminator')).strip(chr(39))}"
        elif item["type"] != "value_error":
            message = f"{message[0].lower()}{message[1:]} (got {item['input']!r:.80})"
        yield f"{key}: {message}" if key else message


def _tags(model: type[BaseModel]) -> set[object]:
    """What pydantic puts into an error's path though people never wrote it.

    The chosen member of a tagged union, and its mark for a mapping's key.
    """
    seen: set[type[BaseModel]] = set()
    ahead = [model]
    while ahead:
        found = ahead.pop()
        if found not in seen:
            seen.add(found)
            for field in found.model_fields.values():
                ahead.extend(_models_in(field.annotation))
    return {"[key]"} | {tag for tag in map(_tag_of, seen) if tag is not None}


def _siblings(
    model: type[BaseModel], location: tuple[str | int, ...], tags: set[object]
) -> set[str]:
    """The keys that are allowed beside the last step of `location`."""
    models: list[type[BaseModel]] = [model]
    for step in location[:-1]:
        if step in tags:
            tagged = [m for m in models if _tag_of(m) == step]
            models = tagged or models
            continue
        models = [
            inner
            for outer in models
            if step in outer.model_fields
            for inner in _models_in(outer.model_fields[str(step)].annotation)
        ]
    return {name for found in models for name in found.model_fields}


def _tag_of(model: type[BaseModel]) -> object:
    for name in ("kind", "name"):
        field = model.model_fields.get(name)
        values = getattr(field.annotation, "__args__", ()) if field else ()
        if values:
            return values[0]
    return None


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _models_in(inner)
