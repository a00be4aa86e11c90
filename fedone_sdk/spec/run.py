"""`RunSpec`, the definition of a run in RUN.yaml. `load_backend` reads only its backend."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from fedone_sdk.budget import Budget
from fedone_sdk.errors import SpecError
from fedone_sdk.spec import sections
from fedone_sdk.spec.backends import BackendSpec
from fedone_sdk.spec.base import RunName, Spec, load_yaml, validate_spec
from fedone_sdk.spec.prompt import PromptSpec
from fedone_sdk.task import TaskSpec
from fedone_sdk.vocabulary import LABELS


class RunSpec(Spec):
    """A tuning run. The classes of the sections describe the keys that are not described here.

    Attributes:
        data: Null if clients have their own data (`fedone serve`).
        calibration: Validation replaces the kind ``auto`` by ``labels`` or ``none``.
        rounds: T, the number of rounds.
        seed: Seed of all random streams.
    """

    name: RunName = "run"
    task: TaskSpec
    data: sections.DataSpec | None = None
    prompt: PromptSpec
    method: sections.MethodSpec = sections.SearchSpec()
    participation: sections.ParticipationSpec = sections.ParticipationSpec()
    calibration: sections.CalibrationSpec = sections.CalibrationSpec()
    defence: sections.DefenceSpec = sections.DefenceSpec()
    privacy: sections.PrivacySpec | None = None
    budget: Budget | None = None
    rounds: Annotated[int, Field(ge=1, le=10_000_000)] = 100
    evaluation: sections.EvaluationSpec = sections.EvaluationSpec()
    backend: BackendSpec = BackendSpec()
    seed: Annotated[int, Field(ge=0, lt=2**53)] = 0

    @model_validator(mode="before")
    @classmethod
    def _name_slots(cls, value: object) -> object:
        """Set the task's `slots` from the prompt, unless a template has ``{prompt}``."""
        if not isinstance(value, dict):
            return value
        task, prompt = value.get("task"), value.get("prompt")
        if not isinstance(task, dict) or "slots" in task or not {"task", "prompt"} <= value.keys():
            return value
        chat = task.get("chat")
        written = [task.get("template"), *(chat.values() if isinstance(chat, dict) else ())]
        if any("{prompt}" in text for text in written if isinstance(text, str)):
            return value
        if not isinstance(prompt, dict):
            if isinstance(prompt, PromptSpec):
                return value
            raise ValueError(f"prompt: must be a mapping of keys (got {prompt!r:.80})")
        slots = prompt.get("slots", ())
        if not isinstance(slots, list | tuple) or not all(isinstance(slot, dict) for slot in slots):
            raise ValueError(f"prompt.slots: must be a list of mappings (got {slots!r:.80})")
        names = [name for slot in slots if isinstance(name := slot.get("name"), str)]
        names = [name for name in names if name != LABELS]
        return {**value, "task": {**task, "slots": names}} if names else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        part = self.participation
        if "exchange" not in part.model_fields_set:
            part = part.model_copy(update={"exchange": self.method.exchange})
            object.__setattr__(self, "participation", part)
        clients = self.data.num_clients if self.data else math.inf
        if part.clients_per_round > clients and part.selection == "uniform":
            raise ValueError(
                f"participation.clients_per_round: {part.clients_per_round} is more than "
                f"data.num_clients ({clients})"
            )
        if self.task.slots and self.task.slots != self.prompt.text_slots:
            raise ValueError(
                f"task.slots: must be {', '.join(self.prompt.text_slots) or 'empty'}, the slots of "
                "prompt.slots besides labels"
            )
        if self.prompt.proposer is not None and not self.method.pools:
            raise ValueError(f"prompt.proposer: needs {sections.SEARCHES}, not {self.method.name}")
        if self.prompt.reflects and self.privacy is not None:
            raise ValueError(
                "prompt.proposer.kind: must be scores in a run with privacy, because with "
                "reflection a model reads rows without noise"
            )
        if self.prompt.chooses_labels and self.task.generates:
            raise ValueError("prompt.slots: slot 'labels' needs a task with label words")
        if isinstance(self.method, sections.OwnMethodSpec) and self.method.object is None:
            raise ValueError("method.object: is required for method own")
        if part.exchange == "alpha" != self.method.exchange:
            raise ValueError(
                f"participation.exchange: must be losses for method {self.method.name}, "
                "which the server runs"
            )
        if self.prompt.length_penalty and part.exchange == "alpha":
            raise ValueError("prompt.length_penalty: needs participation.exchange losses")
        if self.method.pools:
            self.check_shared_memory(self.method.name, "the prompts")
        target = self.privacy and self.privacy.target
        if target == "alpha" and part.exchange == "losses":
            raise ValueError("privacy.target: must be losses with participation.exchange losses")
        self._check_calibration()
        self._check_defence()
        return self

    def check_shared_memory(self, method: str, memories: str) -> None:
        """Raise ``ValueError`` if the states of several clients would have to be averaged."""
        part = self.participation
        if part.clients_per_round > 1 and self.method.local_steps > 1:
            raise ValueError(
                f"participation.clients_per_round: must be 1 for {method} with several local steps "
                f"({memories} of several clients cannot be averaged)"
            )

    def _check_calibration(self) -> None:
        kind, reason = self.calibration.kind, self.against_bias()
        if reason is None and not self.method.pools:
            reason = f"needs {sections.SEARCHES}, not {self.method.name}"
        if kind == "labels" and reason is not None:
            raise ValueError(f"calibration: labels {reason}")
        if kind == "auto":
            kind = "labels" if reason is None else "none"
            object.__setattr__(self, "calibration", sections.CalibrationSpec(kind=kind))

    def against_bias(self) -> str | None:
        """Return why no label bias can be fitted; None if a bias can be fitted."""
        task = self.task
        if task.generates:
            return "needs a task with label words"
        if task.loss != "cross_entropy":
            return f"needs task.loss cross_entropy, not {task.loss}"
        return "needs a task without a bias" if task.bias is not None else None

    def _check_defence(self) -> None:
        part = self.participation
        if not self.defence.checks_updates:
            return
        # A dishonest client could report too many examples, to get more weight or rounds.
        if part.clients_per_round > 1 and part.aggregation == "examples":
            raise ValueError(
                "participation.aggregation: must be plain under a defence with more than 1 client "
                "per round"
            )
        if part.selection == "proportional":
            raise ValueError("participation.selection: must be uniform under a defence")

    def served(self) -> Self:
        """Return the spec of a run on a server, where ``defence`` is ``standard`` by default.

        Raises:
            SpecError: The spec does not set ``defence``, and cannot be combined with ``standard``.
        """
        if "defence" in self.model_fields_set:
            return self
        # Not clipped: the nll of a long reference may exceed the `loss_clip` of ``standard``.
        unclipped = {"loss_clip": None} if self.task.loss == "nll" else {}
        standard = sections.DefenceSpec.model_validate({"kind": "standard", **unclipped})
        spec = self.model_copy(update={"defence": standard})
        try:
            spec._check_defence()
        except ValueError as exc:
            raise SpecError(f"{exc}; a served run's default is defence: standard") from exc
        return spec

    def check_caps(self, bounds: Collection[str]) -> None:
        """Raise `SpecError` if a cap's unit is not in `bounds`.

        `bounds` are the units in which the maximum cost of a request is known before it is sent.
        """
        caps = {} if self.budget is None else self.budget.model_dump(exclude_none=True)
        for unit in (unit for unit in caps if unit not in bounds):
            if unit == "usd" and {"prompt_tokens", "completion_tokens"} <= {*bounds}:
                raise SpecError(
                    "budget.usd: the price of this model is not known; set backend.prices "
                    "(prompt and completion, US dollars per million tokens), or cap tokens instead"
                )
            raise SpecError(
                f"budget.{unit}: cannot be capped, because this cost of a request is not known "
                f"before it is sent; allowed: {', '.join(sorted(bounds))}"
            )

    def is_same_run(self, other: RunSpec) -> bool:
        """Return whether a stored run can continue with the other spec.

        The backend may differ, because the fingerprint identifies the model. Caps may be higher.
        """
        same: dict[str, Any] = {"backend": self.backend}
        if self.budget and other.budget:
            with suppress(ValueError):  # `raised` refuses lower caps and caps in new units.
                if self.budget.raised(other.budget) == other.budget:
                    same["budget"] = self.budget
        return self == other.model_copy(update=same)

    def differences(self, other: RunSpec) -> Iterator[str]:
        """Yield differences from another spec: ``key VALUE -> OTHER``; long values are omitted."""
        yield from _differences(
            self.model_dump(exclude={"backend"}), other.model_dump(exclude={"backend"})
        )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a RUN.yaml.

        Raises:
            SpecError: One line per mistake: file, key, what is allowed.
        """
        return validate_spec(cls, load_yaml(path), source=str(path))


_MAX_SHOWN = 64
"""Maximum length of two values in a difference, characters."""


def _differences(
    one: Mapping[str, Any], other: Mapping[str, Any], parent: str = ""
) -> Iterator[str]:
    for name in dict.fromkeys((*one, *other)):
        value, changed, key = one.get(name), other.get(name), f"{parent}{name}"
        if isinstance(value, dict) and isinstance(changed, dict):
            yield from _differences(value, changed, f"{key}.")
        elif value != changed:
            texts = (json.dumps(v, ensure_ascii=False, default=str) for v in (value, changed))
            shown = " -> ".join(texts)
            yield f"{key} {shown}" if len(shown) <= _MAX_SHOWN else key


class _File(Spec):
    backend: BackendSpec


def load_backend(path: str | Path) -> BackendSpec:
    """Read a backend from a RUN.yaml, or from a file with the keys of its section ``backend``.

    Raises:
        SpecError: As for `RunSpec.load`.
    """
    source, document = str(path), load_yaml(path)
    if not isinstance(document, dict):
        raise SpecError("must be a mapping with key backend, or kind, model ...", source=source)
    if "backend" not in document and "task" not in document:
        try:
            return validate_spec(_File, {"backend": document}, source=source).backend
        except SpecError as exc:  # In this file, the keys are not below ``backend``.
            problems = [problem.removeprefix("backend.") for problem in exc.problems]
            raise SpecError(problems, source=source) from None
    unknown = [str(key) for key in document if key not in RunSpec.model_fields]
    if unknown:
        allowed = "the file may be a RUN.yaml, or its backend section"
        raise SpecError([f"{key}: unknown key ({allowed})" for key in unknown], source=source)
    return validate_spec(
        _File, {"backend": document.get("backend", {"kind": "onnx"})}, source=source
    ).backend
