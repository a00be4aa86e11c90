"""Examples: loading them, partitioning them over clients, drawing mini-batches."""

from fedone_sdk.data.loaders import (
    check_examples,
    label_columns,
    load_examples,
    split_dev,
    text_columns,
)
from fedone_sdk.data.partition import Partition, dirichlet, iid, k_shot, partition_clients
from fedone_sdk.data.splitmix import SplitMix64, draw_minibatch

__all__ = [
    "Partition",
    "SplitMix64",
    "check_examples",
    "dirichlet",
    "draw_minibatch",
    "iid",
    "k_shot",
    "label_columns",
    "load_examples",
    "partition_clients",
    "split_dev",
    "text_columns",
]
