"""The wire contract: all messages between edge clients and an aggregator, as pydantic models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk.imports import lazy

# Lazy imports: an edge device only loads the modules that it uses.
if TYPE_CHECKING:
    from fedone_sdk.messages.assignment import *
    from fedone_sdk.messages.base import *
    from fedone_sdk.messages.enrolment import *
    from fedone_sdk.messages.monitoring import *
    from fedone_sdk.messages.prompt_report import *
    from fedone_sdk.messages.run import *
    from fedone_sdk.messages.score import *
    from fedone_sdk.messages.tensor import *
    from fedone_sdk.messages.update import *
else:
    __getattr__, __dir__ = lazy(
        globals(), "base tensor assignment enrolment score update run prompt_report monitoring"
    )

__all__ = [
    "About",
    "AlphaAssignment",
    "AlphaUpdate",
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
    "Judged",
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
    "PositionProbabilities",
    "Preference",
    "PrivacyReport",
    "Problem",
    "PromptReport",
    "Proposal",
    "ProposerReport",
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
    "Secret",
    "Spread",
    "Standing",
    "Step",
    "Tensor",
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
    "Written",
    "check_protocol",
    "encode",
    "first_error",
    "is_sendable",
]
