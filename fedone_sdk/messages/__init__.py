"""The wire contract: all messages between edge clients and an aggregator, as pydantic models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk._lazy import lazy

# Lazy imports: an edge device only loads the modules that it uses.
if TYPE_CHECKING:
    from fedone_sdk.messages.array import MAX_ELEMENTS, Array
    from fedone_sdk.messages.assignment import (
        ASSIGNMENT,
        AlphaAssignment,
        Assignment,
        Claim,
        LossesAssignment,
        Reflection,
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
        Parse,
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
    from fedone_sdk.messages.score import (
        MAX_CASES,
        MAX_TEXT_CHARS,
        MAX_WRITTEN_CHARS,
        Case,
        Proposal,
        Reflect,
        Reflected,
        Score,
        Scores,
    )
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
        globals(),
        {
            "array": "MAX_ELEMENTS Array",
            "assignment": (
                "ASSIGNMENT AlphaAssignment Assignment Claim LossesAssignment Reflection "
                "Renewal RunTask Step VocabularyList"
            ),
            "base": (
                "MAX_MODEL_CHARS PROTOCOL_HEADER PROTOCOL_VERSION Message Parse "
                "Problem check_protocol encode first_error is_sendable"
            ),
            "enrolment": (
                "ClientInfo ClientList CreatedToken Enrol Enrolled NewToken Rotated TokenInfo "
                "TokenList"
            ),
            "run": (
                "CacheReport Cap CensoringReport ClientInfluence MetricReport PrivacyReport "
                "PromptReport RoundReport RunDevices RunEvent RunResult RunStatus Traffic "
                "UnfitDevices"
            ),
            "schema": "json_schemas",
            "score": (
                "MAX_CASES MAX_TEXT_CHARS MAX_WRITTEN_CHARS Case Proposal Reflect Reflected Score "
                "Scores"
            ),
            "steering": "About Check Health Quarantine Removal RollBack RunEntry RunSummary",
            "update": (
                "MAX_LOSS MIN_SCORED_SHARE UPDATE AlphaUpdate Decline LossesUpdate Receipt Scored "
                "Update"
            ),
            "verdict": "COMPARED Compared Spread Standing Verdict",
            "watch": (
                "LostWork Me PositionProbabilities SeatReport Seats TokenProbabilities "
                "TokenProbability"
            ),
        },
    )

__all__ = [
    "ASSIGNMENT",
    "About",
    "AlphaAssignment",
    "AlphaUpdate",
    "Array",
    "Assignment",
    "COMPARED",
    "CacheReport",
    "Cap",
    "Case",
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
    "MAX_CASES",
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
    "Parse",
    "PositionProbabilities",
    "PrivacyReport",
    "Problem",
    "PromptReport",
    "Proposal",
    "Quarantine",
    "Receipt",
    "Reflect",
    "Reflected",
    "Reflection",
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
