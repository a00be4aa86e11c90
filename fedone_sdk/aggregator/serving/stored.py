"""Runs that are in the store and not served here: what is known of them without reading them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

from fedone_sdk.budget import Usage
from fedone_sdk.messages import Cap, RunSummary
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import RunHead

__all__ = ["StoredRun"]

_ROUNDS = RunSpec.model_fields["rounds"].default


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """What is known of a stored run without its candidates, arrays and log.

    Attributes:
        version: The version that this is known of.
        live: Whether the run has to be served: it runs, waits, or has something under way.
        final: Whether it can never go on.
        clients: Clients that it knows by their enrolment index: at work, in quarantine, or counted
            for its privacy.
        summary: For people.
    """

    version: int
    live: bool
    final: bool
    clients: frozenset[int]
    summary: RunSummary

    @classmethod
    def of(cls, head: RunHead) -> Self:
        """What the head of a run says.

        Raises:
            ValueError: It is damaged.
        """
        document = json.loads(head.document)
        try:
            return cls._of(head, document)
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"not a run's state: {exc}") from exc

    @classmethod
    def _of(cls, head: RunHead, document: dict[str, Any]) -> Self:
        status, account = document["status"], document["account"]
        under_way = document["seats"] or account["leases"] or document["evaluation"]["leases"]
        return cls(
            version=head.version,
            live=status == "running" or document["paused"] or bool(under_way),
            final=status not in ("running", "stopped", "failed"),
            clients=frozenset(
                [
                    *(seat["client"] for seat in document["seats"]),
                    *document.get("quarantined", ()),
                    *(client for client, _ in document.get("releases", ())),
                ]
            ),
            summary=RunSummary(
                run_id=head.run_id,
                status=status,
                round=document["round"],
                rounds=json.loads(head.spec).get("rounds", _ROUNDS),
                cap=Cap.model_validate(account["cap"] or {}),
                spent=Usage.model_validate(account["spent"]),
                priced=not document["counters"].get("unpriced"),
                created_at=head.created_at,
                ended_at=document["ended_at"],
                metric=document["metric"].get("after"),
                metric_name=document["metric"].get("name"),
            ),
        )
