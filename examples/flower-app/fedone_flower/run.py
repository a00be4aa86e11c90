"""The run: feedback sentences and the embedded model, both shipped with the SDK."""

from functools import cache

from fedone_sdk import Budget, RunSpec, assets
from fedone_sdk.local import Federation


@cache  # Nodes of a simulation share a process.
def federation(nodes: int, rounds: int, queries: int) -> Federation:
    """Return the run with its data spread over the nodes, as the app's config says."""
    path = assets.path("quickstart-mini.yaml")
    spec = RunSpec.load(path)
    assert spec.data is not None
    changed = {
        "data": spec.data.model_copy(update={"num_clients": nodes}),
        "rounds": rounds,
        "budget": Budget(queries=queries),
        # The server learns and nodes return losses alone: a few hundred bytes a round.
        "participation": spec.participation.model_copy(update={"exchange": "losses"}),
    }
    return Federation.load(spec.model_copy(update=changed), path.parent)


def configured(config: object) -> Federation:
    """Return the run that Flower's run config describes."""
    assert isinstance(config, dict)
    return federation(*(int(config[key]) for key in ("nodes", "rounds", "queries")))
