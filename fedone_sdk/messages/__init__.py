"""The wire contract: every message between edge clients and an aggregator, as pydantic models."""

from fedone_sdk.messages.array import MAX_ELEMENTS, Array
from fedone_sdk.messages.assignment import (
    ASSIGNMENT,
    AlphaAssignment,
    Assignment,
    Claim,
    LossesAssignment,
    RunTask,
    Step,
    VocabularyList,
)
from fedone_sdk.messages.base import Message
from fedone_sdk.messages.enrolment import Enrol, Enrolled
from fedone_sdk.messages.problem import Problem
from fedone_sdk.messages.run import (
    CacheReport,
    Cap,
    MetricReport,
    PromptReport,
    RoundReport,
    RunResult,
    RunStatus,
    Traffic,
)
from fedone_sdk.messages.schema import json_schemas
from fedone_sdk.messages.score import MAX_TEXT_CHARS, Score, Scores
from fedone_sdk.messages.update import (
    MIN_SCORED_SHARE,
    UPDATE,
    AlphaUpdate,
    Decline,
    LossesUpdate,
    Receipt,
    Scored,
    Update,
)

__all__ = [
    "ASSIGNMENT",
    "AlphaAssignment",
    "AlphaUpdate",
    "Array",
    "Assignment",
    "CacheReport",
    "Cap",
    "Claim",
    "Decline",
    "Enrol",
    "Enrolled",
    "LossesAssignment",
    "LossesUpdate",
    "MAX_ELEMENTS",
    "MAX_TEXT_CHARS",
    "MIN_SCORED_SHARE",
    "Message",
    "MetricReport",
    "Problem",
    "PromptReport",
    "Receipt",
    "RoundReport",
    "RunResult",
    "RunStatus",
    "RunTask",
    "Score",
    "Scored",
    "Scores",
    "Step",
    "Traffic",
    "UPDATE",
    "Update",
    "VocabularyList",
    "json_schemas",
]
