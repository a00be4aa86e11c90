"""Black-box prompt search in pure NumPy: `ask`/`tell` methods and the aggregation of results."""

from __future__ import annotations

from .aggregation import aggregate
from .bdpl import BDPL
from .gs_bdpl import GumbelSoftmaxBDPL
from .method import Algorithm, Candidates, ClassLosses, PlainAlgorithm
from .optimizers import SGD, AdamW, Optimizer, make_optimizer
from .own import check_algorithm, load_method
from .random_search import RandomSearch
from .registry import METHODS, make_method, method_from_spec, method_options
from .sampling import select, stream, stream_seed
from .simplex import project_to_simplex
from .space import Space
from .state import (
    Memory,
    State,
    alpha_sha256,
    dump_memory,
    dump_state,
    load_memory,
    load_state,
)
from .thompson import ThompsonSampling
from .tpe import TPE

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
