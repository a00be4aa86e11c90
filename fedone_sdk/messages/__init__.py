"""The wire contract: all messages between edge clients and an aggregator, as pydantic models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk._lazy import lazy

# Lazy imports: an edge device only loads the modules that it uses.
if TYPE_CHECKING:
    from fedone_sdk.messages.array import MAX_ELEMENTS, Array
    from fedone_sdk.messages.assignment import (
        AlphaAssignment,
        Assignment,
        Claim,
        LossesAssignment,
        Renewal,
        RunTask,
        Step,
        VocabularyList,
    )
    from fedone_sdk.messages.base import (
        MAX_MODEL_CHARS,
        PROTOCOL_HEADER,
        PROTOCOL_VERSION,
        Message,
        Problem,
        check_protocol,
        encode,
        first_error,
        is_sendable,
    )
    from fedone_sdk.messages.enrolment import (
        ClientInfo,
        ClientList,
        CreatedToken,
        Enrol,
        Enrolled,
        NewToken,
        Rotated,
        TokenInfo,
        TokenList,
    )
    from fedone_sdk.messages.run import (
        CacheReport,
        Cap,
        CensoringReport,
        ClientInfluence,
        MetricReport,
        PrivacyReport,
        PromptReport,
        RoundReport,
        RunDevices,
        RunEvent,
        RunResult,
        RunStatus,
        Traffic,
        UnfitDevices,
    )
    from fedone_sdk.messages.schema import json_schemas
    from fedone_sdk.messages.score import MAX_TEXT_CHARS, MAX_WRITTEN_CHARS, Score, Scores
    from fedone_sdk.messages.steering import (
        About,
        Check,
        Health,
        Quarantine,
        Removal,
        RollBack,
        RunEntry,
        RunSummary,
    )
    from fedone_sdk.messages.update import (
        MAX_LOSS,
        MIN_SCORED_SHARE,
        UPDATE,
        AlphaUpdate,
        Decline,
        LossesUpdate,
        Receipt,
        Scored,
        Update,
    )
    from fedone_sdk.messages.verdict import COMPARED, Compared, Spread, Standing, Verdict
    from fedone_sdk.messages.watch import (
        LostWork,
        Me,
        PositionProbabilities,
        SeatReport,
        Seats,
        TokenProbabilities,
        TokenProbability,
    )
else:
    __getattr__, __dir__ = lazy(
        globals(), "base array assignment enrolment score update run verdict steering watch schema"
    )

__all__ = [
    "About",
    "AlphaAssignment",
    "AlphaUpdate",
    "Array",
    "Assignment",
    "COMPARED",
    "CacheReport",
    "Cap",
    "CensoringReport",
    "Check",
    "Claim",
    "ClientInfluence",
    "ClientInfo",
    "ClientList",
    "Compared",
    "CreatedToken",
    "Decline",
    "Enrol",
    "Enrolled",
    "Health",
    "LossesAssignment",
    "LossesUpdate",
    "LostWork",
    "MAX_ELEMENTS",
    "MAX_LOSS",
    "MAX_MODEL_CHARS",
    "MAX_TEXT_CHARS",
    "MAX_WRITTEN_CHARS",
    "MIN_SCORED_SHARE",
    "Me",
    "Message",
    "MetricReport",
    "NewToken",
    "PROTOCOL_HEADER",
    "PROTOCOL_VERSION",
    "PositionProbabilities",
    "PrivacyReport",
    "Problem",
    "PromptReport",
    "Quarantine",
    "Receipt",
    "Removal",
    "Renewal",
    "RollBack",
    "Rotated",
    "RoundReport",
    "RunDevices",
    "RunEntry",
    "RunEvent",
    "RunResult",
    "RunStatus",
    "RunSummary",
    "RunTask",
    "Score",
    "Scored",
    "Scores",
    "SeatReport",
    "Seats",
    "Spread",
    "Standing",
    "Step",
    "TokenInfo",
    "TokenList",
    "TokenProbabilities",
    "TokenProbability",
    "Traffic",
    "UPDATE",
    "UnfitDevices",
    "Update",
    "Verdict",
    "VocabularyList",
    "check_protocol",
    "encode",
    "first_error",
    "is_sendable",
    "json_schemas",
]
