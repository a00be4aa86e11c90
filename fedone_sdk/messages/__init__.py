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
from fedone_sdk.messages.model import (
    MAX_INPUT_CHARS,
    MAX_INPUTS,
    LabelWords,
    ModelAnswer,
    ModelInfo,
    ModelProblem,
    ModelQuery,
)
from fedone_sdk.messages.problem import Problem
from fedone_sdk.messages.run import (
    CacheReport,
    Cap,
    CensoringReport,
    MetricReport,
    PromptReport,
    RoundReport,
    RunResult,
    RunStatus,
    Traffic,
)
from fedone_sdk.messages.schema import json_schemas
from fedone_sdk.messages.score import MAX_TEXT_CHARS, MAX_WRITTEN_CHARS, Score, Scores
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
    "CensoringReport",
    "Claim",
    "Decline",
    "Enrol",
    "Enrolled",
    "LabelWords",
    "LossesAssignment",
    "LossesUpdate",
    "MAX_ELEMENTS",
    "MAX_INPUTS",
    "MAX_INPUT_CHARS",
    "MAX_TEXT_CHARS",
    "MAX_WRITTEN_CHARS",
    "MIN_SCORED_SHARE",
    "Message",
    "MetricReport",
    "ModelAnswer",
    "ModelInfo",
    "ModelProblem",
    "ModelQuery",
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
