"""An edge client beside an app that has no event loop."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Self

import structlog

from fedone_sdk.client.edge_client import EdgeClient
from fedone_sdk.errors import FedOneError

__all__ = ["EdgeClientThread"]

_log = structlog.get_logger(__name__)


class EdgeClientThread:
    """Runs an edge client in a daemon thread, with an event loop of its own.

    Example:
        ```python
        with EdgeClientThread(EdgeClient(server, token=token, data=rows, state_dir=folder)):
            app.main_loop()
        ```

    The client's functions (`data`, `before_send`, `only_when`, `on_event`, `score`) are called in
    that thread. All methods may be called from any thread.

    Args:
        client: The client; nobody else may use it until the thread has ended.
        stop_timeout_s: How long the end of the ``with`` block waits for work under way, seconds.
    """

    def __init__(self, client: EdgeClient, *, stop_timeout_s: float = 10.0) -> None:
        self._client = client
        self._stop_timeout_s = stop_timeout_s
        self._thread = threading.Thread(target=self._run, name="fedone edge client", daemon=True)
        # Instead of `Thread.join` and `is_alive`: after a Ctrl-C in `join`, CPython 3.11 takes a
        # thread that works for one that has ended.
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._working: asyncio.Task[None] | None = None
        self._stopping = False
        self._at_work = False
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(self._stop_timeout_s)

    @property
    def running(self) -> bool:
        """Whether the client is at work or waits for some."""
        return self._thread.ident is not None and not self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """What ended the client before its time, such as a token that is not valid."""
        return self._error

    def start(self) -> None:
        """Starts the client.

        Raises:
            RuntimeError: It was started before.
        """
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Ends the client; called again, it does no harm.

        Work under way is finished first. What is not after `timeout_s` is broken off; with a
        state folder it goes on at the next start.

        Args:
            timeout_s: How long to wait for work under way, seconds; None waits for its end.

        Returns:
            Whether the client ended in time; not yet, where one of its own functions calls this.
        """
        with self._lock:
            self._stopping = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop_client)
        if self._thread is threading.current_thread():
            return False
        if self.join(timeout_s):
            return True
        with self._lock:
            if self._loop is not None and self._working is not None:
                self._loop.call_soon_threadsafe(self._working.cancel)
        self.join()
        return False

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the end of the client.

        Args:
            timeout_s: The longest wait, seconds.

        Returns:
            Whether it has ended.
        """
        if self.running and self._thread is not threading.current_thread():
            self._ended.wait(timeout_s)
        return not self.running

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except asyncio.CancelledError:
            pass  # `stop` ran out of patience
        except BaseException as exc:
            self._error = exc
            # Of an app's own errors only the kind: they may quote private text.
            reason = str(exc) if isinstance(exc, FedOneError) else None
            _log.error("edge client ended", error=type(exc).__name__, reason=reason)
        finally:
            self._ended.set()

    def _stop_client(self) -> None:
        # In the client's thread. A wish that comes too late would stop the next to start it.
        if self._at_work:
            self._client.stop()

    async def _work(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._working = asyncio.current_task()
            if self._stopping:
                return
        try:
            async with self._client:
                self._at_work = True
                try:
                    await self._client.run_forever()
                finally:
                    self._at_work = False
        finally:
            # From here on the loop may be closed at any moment.
            with self._lock:
                self._loop = None
