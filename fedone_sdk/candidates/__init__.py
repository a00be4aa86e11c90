"""Candidates of a slot: their sources, and the placeholders in them.

The functions here are pure: callers read files and query models.
"""

from __future__ import annotations

from fedone_sdk.candidates.demonstrations import demonstration_candidates
from fedone_sdk.candidates.instructions import code_candidates, instruction_candidates
from fedone_sdk.candidates.label_sets import label_candidates, label_words, shipped_label_sets
from fedone_sdk.candidates.placeholders import (
    fill,
    forms_of,
    label_checks,
    label_placeholder,
    label_sets,
    no_prompt,
    prompt_of,
)
from fedone_sdk.candidates.proposals import (
    ScoredCandidate,
    proposal_messages,
    read_proposals,
    texts_in,
)
from fedone_sdk.candidates.reflection import (
    merge_messages,
    quotes,
    read_reflection,
    reflection_messages,
)
from fedone_sdk.candidates.sources import (
    DemonstrationsSource,
    InstructionsSource,
    LabelSet,
    LabelsSource,
    OwnSource,
)
from fedone_sdk.task import Description

__all__ = [
    "DemonstrationsSource",
    "Description",
    "InstructionsSource",
    "LabelSet",
    "LabelsSource",
    "OwnSource",
    "ScoredCandidate",
    "code_candidates",
    "demonstration_candidates",
    "fill",
    "forms_of",
    "instruction_candidates",
    "label_candidates",
    "label_checks",
    "label_placeholder",
    "label_sets",
    "label_words",
    "merge_messages",
    "no_prompt",
    "prompt_of",
    "proposal_messages",
    "quotes",
    "read_proposals",
    "read_reflection",
    "reflection_messages",
    "shipped_label_sets",
    "texts_in",
]
