"""The ServerApp: it has the model and the budget."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedone_flower.run import configured
from fedone_sdk.backends import OnnxBackend
from fedone_sdk.flower import FedOneStrategy
from fedone_sdk.stores import SqlStore

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Tunes the prompt, and says what came out."""
    config = context.run_config
    federation = configured(config)
    strategy = FedOneStrategy(
        federation.spec,
        federation.vocabulary,
        backend=OnnxBackend(),
        dev=federation.dev,
        store=SqlStore.sqlite(str(config["store"])) if config["store"] else None,
    )
    strategy.start(grid)
    result = strategy.run_result
    print(f"prompt {result.prompt.text!r}, {result.spent.queries} of {result.cap.queries} queries")
    print(f"{result.metric.name}: {result.metric.before} before, {result.metric.after} after")
    if config["result"]:
        Path(str(config["result"])).write_text(result.model_dump_json())
