"""Stored runs that this process does not serve, by the heads of their records."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

from fedone_sdk.budget import Usage
from fedone_sdk.messages import Cap, RunSummary
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import RunHead

_ROUNDS = RunSpec.model_fields["rounds"].default


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A stored run without its candidates, arrays and log.

    Attributes:
        version: Version of the head.
        live: Whether the run must be served: it is running or paused, or has open work.
        final: Whether it has ended for good.
        clients: Enrolment indices that its state refers to: at work, in quarantine, or in its
            privacy accounting.
        summary: Its summary.
    """

    version: int
    live: bool
    final: bool
    clients: frozenset[int]
    summary: RunSummary

    @classmethod
    def of(cls, head: RunHead) -> Self:
        """Return the stored run of a head.

        Raises:
            ValueError: The head is damaged.
        """
        document = json.loads(head.document)
        try:
            return cls._of(head, document)
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"not a run's state: {exc}") from exc

    @classmethod
    def _of(cls, head: RunHead, document: dict[str, Any]) -> Self:
        status, account = document["status"], document["account"]
        open_work = document["seats"] or account["leases"] or document["evaluation"]["leases"]
        return cls(
            version=head.version,
            live=status == "running" or document["paused"] or bool(open_work),
            final=status not in ("running", "stopped", "failed"),
            clients=frozenset(
                [
                    *(seat["client"] for seat in document["seats"]),
                    *document["quarantined"],
                    *(client for client, _ in document["releases"]),
                ]
            ),
            summary=RunSummary(
                run_id=head.run_id,
                status=status,
                round=document["round"],
                rounds=json.loads(head.spec).get("rounds", _ROUNDS),
                cap=Cap.model_validate(account["cap"] or {}),
                spent=Usage.model_validate(account["spent"]),
                priced=not document["counters"]["unpriced"],
                created_at=head.created_at,
                ended_at=document["ended_at"],
                metric=document["metric"]["after"],
                metric_name=document["metric"]["name"],
            ),
        )
