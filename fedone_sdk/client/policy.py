"""Which work an edge client accepts."""

from __future__ import annotations

from dataclasses import dataclass

from fedone_sdk.spec.privacy import RequiredPrivacy


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPolicy:
    """Which work an edge client accepts.

    Attributes:
        run_id: Accepts work of this run only; None accepts work of any run.
        privacy: Declines work with less noise than this, and work that would exceed its
            `max_epsilon`. The count of epsilon is kept in the client's `state_dir` (extra
            ``privacy``). None accepts work without noise.
    """

    run_id: str | None = None
    privacy: RequiredPrivacy | None = None
