"""The paper's table of accuracies: all methods on the seven tasks, one client per round."""

from __future__ import annotations

from fedone_sdk.experiments.method_table import MethodTable
from fedone_sdk.experiments.study import Design
from fedone_sdk.glue import GLUE_TASKS

__all__ = ["Table1"]


class Table1(MethodTable):
    """All methods on GLUE, K* = 1."""

    name = "table1"
    title = "All methods on the seven tasks, one client per round"
    framework = "FedOne"
    design = Design(
        small={
            "num_clients": 10,
            "shots": 8,
            "prompt_len": 5,
            "vocab_size": 50,
            "num_samples": 5,
            "batch_size": 16,
            "rounds": 6,
            "every": 3,
            "searches": False,
        },
        axes={"task": GLUE_TASKS},
        small_axes={"task": ("sst2", "mrpc")},
    )
