"""Examples: loading them, partitioning them over clients, drawing mini-batches."""

from fedone_sdk.data.draws import SplitMix64, dirichlet, draw_minibatch, iid, partition_clients
from fedone_sdk.data.loaders import load_examples
from fedone_sdk.data.row_checks import check_examples

__all__ = [
    "SplitMix64",
    "check_examples",
    "dirichlet",
    "draw_minibatch",
    "iid",
    "load_examples",
    "partition_clients",
]
