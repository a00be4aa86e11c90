"""The supplement to the paper's table of accuracies: ten clients per round."""

from __future__ import annotations

from fedone_sdk.experiments.method_table import MethodTable
from fedone_sdk.experiments.rows import METHODS
from fedone_sdk.experiments.study import Design
from fedone_sdk.glue import GLUE_TASKS

__all__ = ["TableFedavg"]


class TableFedavg(MethodTable):
    """The federated methods on GLUE, K* = 10."""

    name = "table-fedavg"
    title = "The federated methods on the seven tasks, ten clients per round"
    framework = "FedAvg"
    rows = tuple(row for row in METHODS.values() if row.federated)
    design = Design(
        base={"clients_per_round": 10},
        small={
            "num_clients": 10,
            "shots": 8,
            "prompt_len": 5,
            "vocab_size": 50,
            "num_samples": 5,
            "batch_size": 16,
            "rounds": 3,
            "clients_per_round": 3,
            "every": 1,
            "searches": False,
        },
        axes={"task": GLUE_TASKS},
        small_axes={"task": ("sst2",)},
    )
