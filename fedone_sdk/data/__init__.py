"""Examples: loading them, partitioning them over clients, drawing mini-batches."""

from fedone_sdk.data.columns import (
    Labelled,
    Splits,
    columns_of,
    label_columns,
    labelled,
    split,
    text_columns,
)
from fedone_sdk.data.loaders import check_examples, load_examples
from fedone_sdk.data.partition import Partition, dirichlet, iid, partition_clients
from fedone_sdk.data.splitmix import SplitMix64, draw_minibatch

__all__ = [
    "Labelled",
    "Partition",
    "SplitMix64",
    "Splits",
    "check_examples",
    "columns_of",
    "dirichlet",
    "draw_minibatch",
    "iid",
    "label_columns",
    "labelled",
    "load_examples",
    "partition_clients",
    "split",
    "text_columns",
]
