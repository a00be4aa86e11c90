"""Moving a prompt to another model: the run, its cost, and the label biases on that model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from fedone_sdk.algorithms.sampling import stream_seed
from fedone_sdk.backends import LLMBackend, Query, is_known, prediction_queries, rows_of
from fedone_sdk.budget import NOTHING, Account
from fedone_sdk.candidates import label_checks, no_prompt
from fedone_sdk.data import draw_minibatch
from fedone_sdk.errors import SpecError
from fedone_sdk.evaluation.verdict import label_bias
from fedone_sdk.local.federation import Ask, Federation
from fedone_sdk.local.plan import RunPlan, plan_run
from fedone_sdk.reports.artefact import PromptArtefact
from fedone_sdk.spec import BackendSpec, RunSpec, validate_spec
from fedone_sdk.task import Bias, Example, TextPrompt

_SHARE = 0.8
"""The old prompt's share of a position's probability."""

_MAX_NAME = 64

BIAS_EXAMPLES = 128
"""Training examples that a bias is fitted on. On the companion feedback the fit has a standard
deviation of 0.2 nats, which costs 0.005 nats and no measurable accuracy."""


@dataclass(frozen=True, kw_only=True)
class Retuning:
    """An old prompt, and the run that tunes it for another model.

    Attributes:
        federation: The run, which starts from the old prompt.
        biases: Label biases on the new model, by prompt, set by `find_biases`; empty if the run
            is not calibrated by labels.
    """

    artefact: PromptArtefact
    federation: Federation
    biases: dict[TextPrompt, Bias] = field(default_factory=dict)

    @cached_property
    def prompts(self) -> tuple[TextPrompt, ...]:
        """The prompts that need their own bias: the old prompt, and "no prompt"."""
        if self.federation.spec.calibration.kind != "labels":
            return ()
        return tuple(dict.fromkeys([self.bare, self.artefact.prompt.prompt]))

    @property
    def bare(self) -> TextPrompt:
        """The prompt that represents "no prompt"."""
        return no_prompt(self.federation.spec.task, self.federation.vocabulary)

    @cached_property
    def examples(self) -> list[Example]:
        """Training examples for fitting biases, drawn evenly from the clients."""
        distinct = {id(row): row for shard in self.federation.shards for row in shard}
        rows = list(distinct.values())
        seed = stream_seed(self.federation.spec.seed, "retune", 0)
        return [rows[at] for at in sorted(draw_minibatch(len(rows), BIAS_EXAMPLES, seed))]

    async def plan(self, backend: LLMBackend) -> RunPlan:
        """Compute the cost of the run with its label biases; a hosted model is not queried."""
        spec = self.federation.spec
        spec.check_caps(backend.bounds)
        if not backend.local:
            for words, form in label_checks(spec.task, self.federation.vocabulary):
                await backend.check(words, form)
        plan = await plan_run(self.federation, backend=backend)
        queries = [query for prompt in self.prompts for query in self._queries(backend, prompt)]
        quoted = sum([await backend.quote(query) for query in queries], NOTHING).without_queries()
        leased = (backend.worst_case(spec.method.batch_size) * len(queries)).without_queries()
        smallest = plan.smallest_cap + leased
        if not Account(cap=spec.budget).affordable(smallest, 1):
            tokens = smallest.prompt_tokens + smallest.completion_tokens
            raise SpecError(
                "budget: may not cover one round and all measurements; the smallest cap that "
                f"does is {smallest.queries} queries, {smallest.requests} requests, {tokens} "
                f"tokens, USD {smallest.usd:.4f}"
            )
        return plan.model_copy(
            update={
                "evaluation_queries": plan.evaluation_queries + len(queries),
                "expected": plan.expected + quoted,
                "most": plan.most + leased,
                "smallest_cap": smallest,
            }
        )

    async def find_biases(self, backend: LLMBackend, ask: Ask) -> None:
        """Fit the label biases of the old prompt and of "no prompt" on the new model."""
        for prompt in self.prompts:
            queries = self._queries(backend, prompt)
            # Known answers are free, also when the caps are spent.
            unknown = [query for query in queries if not await is_known(backend, query)]
            paid = dict(zip(unknown, await ask(unknown), strict=True)) if unknown else {}
            rows = [
                row
                for query in queries
                for row in rows_of(query, paid.get(query) or await backend.score(query))
            ]
            self.biases[prompt] = label_bias(self.federation.spec.task, rows, self.examples)

    def _queries(self, backend: LLMBackend, prompt: TextPrompt) -> list[Query]:
        spec = self.federation.spec
        return prediction_queries(backend, spec.task, prompt, self.examples, spec.method.batch_size)


def retune_name(artefact: PromptArtefact, backend: str) -> str:
    """Return the name of the run, from the names of the artefact and the backend file."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{artefact.name}-on-{backend}")[:_MAX_NAME]


def retune_spec(
    artefact: PromptArtefact, backend: BackendSpec, run: RunSpec, *, name: str
) -> RunSpec:
    """Return the run that starts from an artefact's prompt and uses another model."""
    tokens, slots = artefact.prompt.tokens, artefact.prompt.slots is not None
    if not slots and "".join(tokens) != artefact.prompt.text:
        raise SpecError("prompt: its tokens do not make its text")
    problems = list(_misfits(artefact, run))
    if problems:
        raise SpecError(problems)
    given = run.model_dump()
    given["name"], given["backend"] = name, backend
    given["prompt"]["start"] = [{token: _SHARE} for token in tokens]
    if not slots:
        given["prompt"]["length"] = max(given["prompt"]["length"], len(tokens))
        if given["prompt"]["length"] > len(tokens):  # The other positions start half blank.
            words = given["prompt"]["vocabulary"]
            listed = words.get("candidates", ())
            words |= {"candidates": ("", *filter(None, listed))} if listed else {"blank": True}
    # The old label bias belongs to the old model, so the task starts without one.
    if given["task"]["bias"] is not None:
        given["task"] |= {"bias": None}
        given["calibration"] = "auto"
    return validate_spec(RunSpec, given, source="arguments")


def _misfits(artefact: PromptArtefact, run: RunSpec) -> list[str]:
    old, new, problems = artefact.task, run.task, []
    names = [slot.name for slot in artefact.prompt.slots or ()]
    if names != list(run.prompt.text_slots) or (
        (artefact.prompt.labels is not None) is not run.prompt.chooses_labels
    ):
        wanted = ", ".join([*names, *(["labels"] if artefact.prompt.labels else [])]) or "none"
        problems.append(f"prompt.slots: must be the prompt's slots ({wanted})")
    if list(old.labels) != list(new.labels):
        wanted = ", ".join(old.labels) or "none"
        problems.append(f"task.labels: must be the prompt's labels ({wanted})")
    for key in ("metric", "loss", "label_field"):
        if getattr(old, key) != getattr(new, key):
            was, now = getattr(old, key), getattr(new, key)
            problems.append(
                f"task.{key}: is {now!r}, the prompt was tuned and measured with {was!r}"
            )
    if run.data is None or run.data.dev is None:
        problems.append("data.dev: is required to compare prompts")
    return problems
