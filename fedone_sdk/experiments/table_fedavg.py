"""The supplement to the paper's table of accuracies: ten clients per round."""

from __future__ import annotations

from fedone_sdk.experiments.method_table import MethodTable
from fedone_sdk.experiments.rows import FEDERATED_ROWS, Scale
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.glue import GLUE_TASKS

__all__ = ["TableFedavg"]


class TableFedavg(MethodTable):
    """The federated methods on GLUE, K* = 10."""

    name = "table-fedavg"
    title = "The federated methods on the seven tasks, ten clients per round"
    framework = "FedAvg"
    federated = FEDERATED_ROWS

    def scale(self, settings: Settings) -> Scale:
        """The paper's; or one task and a few small rounds of three clients."""
        if not settings.quick:
            return Scale(tasks=settings.tasks or GLUE_TASKS, clients_per_round=10)
        return Scale(
            tasks=settings.tasks or ("sst2",),
            num_clients=10,
            shots=8,
            prompt_len=5,
            vocab_size=50,
            num_samples=5,
            batch_size=16,
            rounds=3,
            clients_per_round=3,
            every=1,
            searches=False,
        )
