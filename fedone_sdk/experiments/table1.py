"""The paper's table of accuracies: all methods on the seven tasks, one client per round."""

from __future__ import annotations

from fedone_sdk.experiments.method_table import MethodTable
from fedone_sdk.experiments.rows import FEDERATED_ROWS, STANDALONE_ROWS, Scale
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.glue import GLUE_TASKS

__all__ = ["Table1"]


class Table1(MethodTable):
    """All methods on GLUE, K* = 1."""

    name = "table1"
    title = "All methods on the seven tasks, one client per round"
    framework = "FedOne"
    standalone = STANDALONE_ROWS
    federated = FEDERATED_ROWS

    def scale(self, settings: Settings) -> Scale:
        """The paper's; or two tasks and a few small rounds."""
        if not settings.quick:
            return Scale(tasks=settings.tasks or GLUE_TASKS)
        return Scale(
            tasks=settings.tasks or ("sst2", "mrpc"),
            num_clients=10,
            shots=8,
            prompt_len=5,
            vocab_size=50,
            num_samples=5,
            batch_size=16,
            rounds=6,
            every=3,
            searches=False,
        )
