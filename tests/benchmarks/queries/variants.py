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
    """A task of the bench, equal for all methods.

    Attributes:
        name: In keys and JSON.
        base: The variant with the same task, label words and template, IID, one client per round
            and no attack, whose oracle applies here too.
        twin: The variant with the same clients, one per round and no attack, whose no-prompt
            baselines apply here too.
        task: The GLUE task of the rows.
        template: Replaces the task's own; None keeps that.
        words: Label words in label order, replacing the task's own; None keeps those.
        dirichlet: Concentration of the partition; None is IID.
        clients_per_round: K*.
        attack: The attack by a share `ATTACKER_SHARE` of the clients, of `attacks.ATTACKS`; None
            is no attack.
        for_whom: Methods that are run by default: ``all``; ``ours``; or only the
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
        """The display name."""
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
        """Return the task as a run describes it."""
        plain = glue_task(self.task).model_dump(mode="json", exclude_defaults=True)
        labels = dict(plain["labels"])
        if self.words is not None:
            labels = dict(zip(labels, self.words, strict=True))
        template = plain["template"] if self.template is None else self.template
        return {**plain, "template": template, "labels": labels}

    def partition_document(self) -> dict[str, Any]:
        """Return the partition as a run describes it."""
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
"""The variants that the bench's goals are about."""

GLUE_VARIANTS: tuple[Variant, ...] = tuple(
    Variant(name=f"{task}-iid", base=f"{task}-iid", twin=f"{task}-iid", task=task)
    for task in GLUE_TASKS
    if task != "sst2"
)
"""The other tasks, run if the model is above chance."""

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
"""All variants by name."""

_USUAL = (*SST2_VARIANTS, *_PARALLEL, *(one for one in _ATTACKED if one.attack == "inverted"))
_QUICK = (SST2_VARIANTS[0], _ATTACKED[0])


def chosen_variants(settings: Settings) -> tuple[list[Variant], bool]:
    """Return the selected variants, in the order given, each after its twin.

    Returns:
        The variants, and whether the user named them.

    Raises:
        SpecError: There is no variant of such a name.
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
            # A variant is compared with its twin.
            found |= {one.twin: VARIANTS[one.twin], one.name: one}
    return list(found.values()), True
