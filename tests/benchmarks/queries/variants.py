"""The tasks of the bench of queries: label words, templates, partitions, K*, attacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from fedone_sdk.errors import SpecError
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.glue import GLUE_TASKS, glue_task

__all__ = [
    "GLUE_VARIANTS",
    "ATTACKER_SHARE",
    "SST2_VARIANTS",
    "VARIANTS",
    "Variant",
    "chosen_variants",
]

ATTACKER_SHARE = 0.2
"""Share of attackers among the clients of a variant with an attack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A task as all methods get it.

    Attributes:
        name: In keys and JSON.
        base: The variant with the same task, label words and template, IID, one client per round
            and no attack: whose oracle row counts here too.
        twin: The variant with the same clients, one per round and no attack: whose no-prompt
            rows count here too.
        task: One of GLUE's: whose rows.
        template: In the place of the task's own; None keeps that.
        words: Label words in label order, in the place of the task's own; None keeps those.
        dirichlet: Concentration of the partition; None is IID.
        clients_per_round: K*.
        attack: The attack of a share `ATTACKER_SHARE` of the clients, of `attacks.ATTACKS`; None is
            no attack.
        for_whom: Which methods are run where nobody names any: ``all``; ``ours``; or only the
            ``default``.
    """

    name: str
    base: str
    twin: str
    task: str
    template: str | None = None
    words: tuple[str, ...] | None = None
    dirichlet: float | None = None
    clients_per_round: int = 1
    attack: str | None = None
    for_whom: Literal["all", "ours", "default"] = "all"

    @property
    def title(self) -> str:
        """For people."""
        words = " / ".join(word.strip() for word in self.task_document()["labels"].values())
        parts = ["SST-2" if self.task == "sst2" else self.task.upper(), words]
        if self.template is not None:
            parts.append(f"`{self.template}`")
        parts.append("IID" if self.dirichlet is None else f"Dirichlet {self.dirichlet:g}")
        if self.clients_per_round > 1:
            parts.append(f"K* = {self.clients_per_round}")
        if self.attack is not None:
            parts.append(f"{ATTACKER_SHARE:.0%} liars ({self.attack})")
        return ", ".join(parts)

    def task_document(self) -> dict[str, Any]:
        """The task as a run describes it."""
        plain = glue_task(self.task).model_dump(mode="json", exclude_defaults=True)
        labels = dict(plain["labels"])
        if self.words is not None:
            labels = dict(zip(labels, self.words, strict=True))
        template = plain["template"] if self.template is None else self.template
        return {**plain, "template": template, "labels": labels}

    def partition_document(self) -> dict[str, Any]:
        """The partition as a run describes it."""
        if self.dirichlet is None:
            return {"kind": "iid"}
        return {"kind": "dirichlet", "alpha": self.dirichlet}


_WORDS = {
    "terrible": (" terrible", " great"),
    "boring": (" boring", " hilarious"),
    "bad": (" bad", " good"),
}
_TEMPLATES = {
    "was": "{prompt} {sentence} It was {mask}.",
    "film": "{prompt} {sentence} The film is {mask}.",
}
_SKEW = 0.1


def _sst2() -> list[Variant]:
    """Three pairs of label words, two templates, two partitions."""
    found = []
    for pair, words in _WORDS.items():
        for name, template in _TEMPLATES.items():
            base = Variant(
                name=f"sst2-{pair}-{name}-iid",
                base=f"sst2-{pair}-{name}-iid",
                twin=f"sst2-{pair}-{name}-iid",
                task="sst2",
                template=template,
                words=words,
            )
            skewed = f"sst2-{pair}-{name}-dir{_SKEW:g}"
            found += [base, replace(base, name=skewed, twin=skewed, dirichlet=_SKEW)]
    return found


SST2_VARIANTS: tuple[Variant, ...] = tuple(_sst2())
"""What the bench's promises are about."""

GLUE_VARIANTS: tuple[Variant, ...] = tuple(
    Variant(name=f"{task}-iid", base=f"{task}-iid", twin=f"{task}-iid", task=task)
    for task in GLUE_TASKS
    if task != "sst2"
)
"""The other tasks: run where the model is above chance."""

_PARALLEL = tuple(
    replace(
        SST2_VARIANTS[0],
        name=f"{SST2_VARIANTS[0].name}-k{clients}",
        clients_per_round=clients,
        for_whom="ours",
    )
    for clients in (3, 10)
)

_ATTACKED = tuple(
    replace(variant, name=f"{variant.name}-{attack}", attack=attack, for_whom="default")
    for attack in ("inverted", "amplified", "random")
    for variant in SST2_VARIANTS
)

VARIANTS: Mapping[str, Variant] = {
    variant.name: variant for variant in (*SST2_VARIANTS, *_PARALLEL, *_ATTACKED, *GLUE_VARIANTS)
}
"""All by their names."""

_USUAL = (*SST2_VARIANTS, *_PARALLEL, *(one for one in _ATTACKED if one.attack == "inverted"))
_QUICK = (SST2_VARIANTS[0], _ATTACKED[0])


def chosen_variants(settings: Settings) -> tuple[list[Variant], bool]:
    """The variants that the user wants, in the order given, each behind its twin.

    Returns:
        The variants, and whether the user named them.

    Raises:
        SpecError: There is none of such a name.
    """
    asked = settings.options.get("variants")
    if asked is None:
        return [*(_QUICK if settings.quick else _USUAL)], False
    found: dict[str, Variant] = {}
    for pattern in asked.split(","):
        matching = [one for name, one in VARIANTS.items() if fnmatchcase(name, pattern)]
        if not matching:
            raise SpecError(
                f"--set variants: there is no {pattern!r}; {', '.join(VARIANTS)}",
                source="arguments",
            )
        for one in matching:
            # Without its twin there is nothing to compare it with.
            found |= {one.twin: VARIANTS[one.twin], one.name: one}
    return list(found.values()), True
