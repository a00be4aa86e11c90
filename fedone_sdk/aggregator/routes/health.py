"""Readiness checks."""

from __future__ import annotations

import asyncio

import structlog

from fedone_sdk.aggregator.service import Service
from fedone_sdk.messages import Check, Health

_log = structlog.get_logger(__name__)

_TIMEOUT_S = 2.0
"""Timeout of the store check, seconds."""


class Readiness:
    """Checks that the store is available and that the service is neither starting nor stopping.

    The response also reports the gateway's model, which does not affect readiness: updates and
    devices with their own models are served without it, and all replicas share it.
    """

    def __init__(
        self,
        service: Service,
        *,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._service = service
        self._timeout_s = timeout_s
        self._was_ok = self._model_was_ok = True

    async def look(self) -> Health:
        """Run all checks; the result is public, so details are only logged."""
        checks = {"serving": self._serving(), "store": await self._store()}
        ok = all(check.ok for check in checks.values())
        checks["model"] = self._model()
        if ok and not self._was_ok:
            _log.info("ready again")
        self._was_ok = ok
        return Health(status="ok" if ok else "unavailable", checks=checks)

    def _serving(self) -> Check:
        if self._service.draining:
            return Check(ok=False, detail="this process is stopping")
        if self._service.starting:
            return Check(ok=False, detail="this process is loading its runs")
        return Check(ok=True)

    async def _store(self) -> Check:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._service.check_ready()
        except TimeoutError:
            _log.error("not ready: the store does not answer", timeout_s=self._timeout_s)
            return Check(ok=False, detail=f"no answer within {self._timeout_s:g} s")
        except Exception as exc:
            _log.error("not ready: the store cannot be used", error=type(exc).__name__)
            return Check(ok=False, detail="it cannot be used; see the server's log")
        return Check(ok=True)

    def _model(self) -> Check:
        trouble = self._service.trouble
        if (trouble is None) is not self._model_was_ok:
            self._model_was_ok = trouble is None
            if trouble is None:
                _log.info("the model is available again")
            else:
                _log.warning("the model is not available", reason=trouble)
        if trouble is None:
            return Check(ok=True)
        return Check(ok=False, detail="it is not available at the moment; see the server's log")
