"""Methods in pure NumPy: `ask` returns prompts to score, and `tell` takes their losses."""

from __future__ import annotations

from .gradient import aggregate
from .method import Algorithm, Candidates, ClassLosses, Holder, PlainAlgorithm
from .method_state import (
    Memory,
    State,
    alpha_sha256,
    dump_memory,
    dump_state,
    load_memory,
    load_state,
)
from .registry import check_algorithm, load_method, make_method, method_from_spec
from .sampling import select, stream, stream_seed
from .space import Space

__all__ = [
    "Algorithm",
    "Candidates",
    "ClassLosses",
    "Holder",
    "Memory",
    "PlainAlgorithm",
    "Space",
    "State",
    "aggregate",
    "alpha_sha256",
    "check_algorithm",
    "dump_memory",
    "dump_state",
    "load_memory",
    "load_method",
    "load_state",
    "make_method",
    "method_from_spec",
    "select",
    "stream",
    "stream_seed",
]
