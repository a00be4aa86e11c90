"""`fedone serve`: the aggregator as a service."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import structlog
import typer

from fedone_sdk.cli._failures import naming
from fedone_sdk.cli._logs import json_logs, quiet_logs
from fedone_sdk.cli._signals import stopping
from fedone_sdk.errors import SpecError

if TYPE_CHECKING:
    from fedone_sdk.aggregator.config import RunToServe, ServeConfig

__all__ = ["serve"]

_log = structlog.get_logger(__name__)


def serve(
    config_path: Annotated[
        Path, typer.Argument(metavar="CONFIG.yaml", help="The service.", show_default=False)
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether it would start; touch no store.")
    ] = False,
) -> None:
    """Serve tuning runs to edge clients, until SIGTERM or Ctrl-C.

    CONFIG.yaml: {listen: HOST:PORT, store: FILE, auth: {enrolment_tokens: [...], admin_token: ...},
    tls: {certificate: FILE, key: FILE}, backend: {kind: onnx} or null, runs: [RUN.yaml ...]}. A
    token is text or {env: NAME}. Logs are JSON lines on standard output.
    """
    from fedone_sdk.aggregator.config import ServeConfig

    if check:
        quiet_logs()
    else:
        json_logs()
    config = ServeConfig.load(config_path)
    with naming(str(config_path)):
        runs = config.load_runs(config_path.parent)
        asyncio.run(_serve(config, config_path, runs, check=check))
    if check:
        typer.echo(f"{config_path}: would serve {len(runs)} runs at {config.listen}")


async def _serve(config: ServeConfig, path: Path, runs: list[RunToServe], *, check: bool) -> None:
    from fedone_sdk.aggregator import Aggregator
    from fedone_sdk.backends.build import build_backend

    stopped = asyncio.Event()
    admin = config.auth.admin_token
    async with AsyncExitStack() as stack:
        stack.enter_context(stopping(stopped.set))
        backend = None
        if config.backend is not None:
            backend = build_backend(config.backend, path.parent)
            await stack.enter_async_context(backend)
        store = config.build_store(path.parent)
        ssl_context = config.ssl_context(path.parent)
        aggregator = Aggregator(
            backend=backend,
            store=None if check else store,
            enrolment_tokens=[token.get_secret_value() for token in config.auth.enrolment_tokens],
            admin_token=None if admin is None else admin.get_secret_value(),
        )
        await stack.enter_async_context(aggregator)
        for run in runs:
            with naming(str(run.path)):
                await aggregator.add_run(run.spec, run.vocabulary)
        if check:
            return
        host, port = config.address
        try:
            url = await aggregator.listen(host=host, port=port, ssl_context=ssl_context)
        except OSError as exc:
            raise SpecError(f"listen: {config.listen}: {exc.strerror or exc}") from exc
        _log.info("serving", url=url, runs=[run.spec.name for run in runs])
        await stopped.wait()
        _log.info("stopping")
