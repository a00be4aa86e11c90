"""An edge client in a thread, for an app without an event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Self

import structlog

from fedone_sdk.client.edge_client import EdgeClient
from fedone_sdk.errors import FedOneError

_log = structlog.get_logger(__name__)


class EdgeClientThread:
    """Runs an edge client in a daemon thread with its own event loop.

    Example:
        ```python
        with EdgeClientThread(EdgeClient(server, token=token, data=rows, state_dir=folder)):
            app.main_loop()
        ```

    The app's functions (`data` and `Hooks`) are called in that thread. All methods may be called
    from any thread.

    Args:
        client: The client; only the thread may use it until the thread has ended.
        stop_timeout_s: How long the end of the ``with`` block waits for work in progress, seconds.
    """

    def __init__(self, client: EdgeClient, *, stop_timeout_s: float = 10.0) -> None:
        self._client = client
        self._stop_timeout_s = stop_timeout_s
        self._thread = threading.Thread(target=self._run, name="fedone edge client", daemon=True)
        # Instead of `Thread.join` and `is_alive`: after a Ctrl-C in `join`, CPython 3.11 reports a
        # running thread as ended.
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._working: asyncio.Task[None] | None = None
        self._stopping = False
        self._is_working = False
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(self._stop_timeout_s)

    @property
    def running(self) -> bool:
        """Whether the client works or waits for work."""
        return self._thread.ident is not None and not self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """The exception that ended the client, for instance of an invalid token."""
        return self._error

    def start(self) -> None:
        """Start the client.

        Raises:
            RuntimeError: It was started already.
        """
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Stop the client; idempotent.

        Work in progress is finished first. After `timeout_s` it is cancelled; with a state folder
        it resumes at the next start.

        Args:
            timeout_s: How long to wait for work in progress, seconds; None waits for its end.

        Returns:
            Whether the client ended in time; False if one of the app's functions calls this.
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
        """Wait for the end of the client.

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
            pass  # the timeout of `stop`
        except BaseException as exc:
            self._error = exc
            # Only the type of an app's exception: its text may quote private data.
            reason = str(exc) if isinstance(exc, FedOneError) else None
            _log.error("edge client ended", error=type(exc).__name__, reason=reason)
        finally:
            self._ended.set()

    def _stop_client(self) -> None:
        # In the client's thread. A signal after the end would stop the next `run_forever`.
        if self._is_working:
            self._client.stop()

    async def _work(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._working = asyncio.current_task()
            if self._stopping:
                return
        try:
            async with self._client:
                self._is_working = True
                try:
                    await self._client.run_forever()
                finally:
                    self._is_working = False
        finally:
            # From here on the loop may be closed at any time.
            with self._lock:
                self._loop = None
