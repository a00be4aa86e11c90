"""`fedone gateway`: a model for those who must not have its key."""

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
from fedone_sdk.errors import BackendUnavailable, SpecError

if TYPE_CHECKING:
    from fedone_sdk.gateway import GatewayConfig

__all__ = ["gateway"]

_log = structlog.get_logger(__name__)

_GRACE_S = 20.0
"""How long requests under way may take when the process is told to stop, seconds."""


def gateway(
    config_path: Annotated[
        Path, typer.Argument(metavar="CONFIG.yaml", help="The gateway.", show_default=False)
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether it would start, and ask its model.")
    ] = False,
) -> None:
    """Answer for a model to those who hold a token, until SIGTERM or Ctrl-C.

    Its key stays in this process. Others name it in RUN.yaml: backend: {kind: gateway, url: ...}.

    CONFIG.yaml: {listen: HOST:PORT, tls: {certificate: FILE, key: FILE}, tokens: {NAME: ...},
    backend: {kind: openai, ...}, budget: {usd: 5}, ledger: FILE, generated_text: false, limits:
    {client_requests_per_minute: 600, max_inputs: 64, max_text_chars: 20000}}. A token is text or
    {env: NAME}. Logs are JSON lines on standard output.
    """
    from fedone_sdk.gateway import GatewayConfig

    if check:
        quiet_logs()
    else:
        json_logs()
    config = GatewayConfig.load(config_path)
    with naming(str(config_path)):
        asyncio.run(_serve(config, config_path.parent, check=check))
    if check:
        typer.echo(f"{config_path}: would answer {len(config.tokens)} callers at {config.listen}")


async def _serve(config: GatewayConfig, folder: Path, *, check: bool) -> None:
    from fedone_sdk.aggregator.http import listening
    from fedone_sdk.backends.build import build_backend
    from fedone_sdk.budget import BudgetGuard
    from fedone_sdk.gateway import ModelGateway, build_app

    stopped = asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.enter_context(stopping(stopped.set))
        # Who only wants to know leaves no ledger behind.
        guard = BudgetGuard(config.budget) if check else config.build_guard(folder)
        backend = build_backend(config.model, folder, guard=guard)
        await stack.enter_async_context(backend)
        served = ModelGateway(
            backend,
            tokens=config.secrets(),
            guard=guard,
            limits=config.limits,
            generated_text=config.generated_text,
            attempts=config.attempts,
        )
        tls = config.server_tls(folder)
        if tls is not None:
            await stack.enter_async_context(tls.watching())
        try:
            await served.start()
        except BackendUnavailable as exc:
            # It may come up later, and callers are told until then.
            if check:
                raise
            _log.warning("the model does not answer yet", reason=str(exc))
        if guard is not None and not check:
            _warn_of_dead_leases(config, folder)
        if config.exposed:
            _log.warning("tokens cross the network in plain text: set tls", listen=config.listen)
        if check:
            return
        host, port = config.address
        try:
            url = await stack.enter_async_context(
                listening(
                    build_app(served),
                    host=host,
                    port=port,
                    ssl_context=None if tls is None else tls.context,
                    grace_s=_GRACE_S,
                )
            )
        except OSError as exc:
            raise SpecError(f"listen: {config.listen}: {exc.strerror or exc}") from exc
        _log.info("serving", url=url, callers=sorted(config.tokens))
        await stopped.wait()
        _log.info("stopping")


def _warn_of_dead_leases(config: GatewayConfig, folder: Path) -> None:
    """Says how much of the budget is held back by processes that are gone."""
    from fedone_sdk.budget import NOTHING, SqliteLedger

    ledger = config.ledger_in(folder)
    left = [lease for lease in SqliteLedger(ledger).leases() if lease.state() == "ended"]
    if left:
        _log.warning(
            "leases of processes that have ended count against the budget",
            leases=len(left),
            held=sum((lease.worst for lease in left), NOTHING).exact(),
            look=f"fedone budget show {ledger}",
        )
