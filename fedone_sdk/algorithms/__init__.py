"""Black-box prompt search in pure NumPy: `ask`/`tell` methods and the aggregation of results."""

from __future__ import annotations

from .gradient import BDPL, GumbelSoftmaxBDPL, aggregate
from .method import Algorithm, Candidates, ClassLosses, PlainAlgorithm
from .optimizers import SGD, AdamW, Optimizer, make_optimizer
from .registry import (
    METHODS,
    check_algorithm,
    load_method,
    make_method,
    method_from_spec,
    method_options,
)
from .sampling import select, stream, stream_seed
from .searches import TPE, RandomSearch, ThompsonSampling
from .space import Space, project_to_simplex
from .state import Memory, State, alpha_sha256, dump_memory, dump_state, load_memory, load_state

__all__ = [
    "AdamW",
    "Algorithm",
    "BDPL",
    "Candidates",
    "ClassLosses",
    "GumbelSoftmaxBDPL",
    "METHODS",
    "Memory",
    "Optimizer",
    "PlainAlgorithm",
    "RandomSearch",
    "SGD",
    "Space",
    "State",
    "TPE",
    "ThompsonSampling",
    "aggregate",
    "alpha_sha256",
    "check_algorithm",
    "dump_memory",
    "dump_state",
    "load_memory",
    "load_method",
    "load_state",
    "make_method",
    "make_optimizer",
    "method_from_spec",
    "method_options",
    "project_to_simplex",
    "select",
    "stream",
    "stream_seed",
]
