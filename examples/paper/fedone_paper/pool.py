"""Worker processes on this machine, each of which runs one trial at a time."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import structlog

from fedone_paper.experiment import Result, TrialFunction, Workspace
from fedone_sdk.errors import FedOneError, one_line

ONE_THREAD = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
"""What numerical libraries read when they are loaded: parallel trials need one thread each."""


@dataclass(frozen=True, slots=True)
class Job:
    """A trial as a worker receives it."""

    key: str
    run: TrialFunction
    options: dict[str, Any]
    workspace: Workspace


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a trial failed.

    Attributes:
        message: One line.
        details: The traceback, or how a process died.
    """

    message: str
    details: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a job, or why it failed, and how long it took."""

    key: str
    found: Result | Failure
    wall_s: float


def perform(job: Job) -> Outcome:
    """Run a job; an exception becomes a `Failure`."""
    began = time.monotonic()
    found: Result | Failure
    try:
        found = job.run(job.options, job.workspace)
    except Exception as exc:
        text = one_line(exc)
        message = text if isinstance(exc, FedOneError) else f"{type(exc).__name__}: {text}"
        found = Failure(message, traceback.format_exc())
    return Outcome(job.key, found, time.monotonic() - began)


def run_in_processes(jobs: Iterable[Job], workers: int) -> Generator[Outcome]:
    """Run jobs in at most `workers` processes, and yield outcomes as they arrive.

    A process that dies fails its trial and is replaced. Closing the iterator kills running jobs.
    """
    waiting = deque(jobs)
    at_work: dict[Connection, _Worker] = {}
    idle: list[_Worker] = []
    try:
        while waiting or at_work:
            while waiting and len(at_work) < workers:
                worker = idle.pop() if idle else _Worker()
                worker.give(waiting.popleft())
                at_work[worker.connection] = worker
            for ready in wait(list(at_work)):
                assert isinstance(ready, Connection)
                worker = at_work.pop(ready)
                outcome = worker.take()
                if worker.alive:
                    idle.append(worker)
                yield outcome
    finally:
        for worker in (*idle, *at_work.values()):
            worker.kill()


class _Worker:
    """One process, and the pipe to it."""

    def __init__(self) -> None:
        # Not a fork: a process with threads must not be copied.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_work, args=(theirs,), name="fedone-trial", daemon=True
        )
        before = {name: os.environ.get(name) for name in ONE_THREAD}
        os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
        try:
            self._process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
        theirs.close()
        self.alive = True
        self._job: Job | None = None
        self._began = 0.0

    def give(self, job: Job) -> None:
        """Send a job."""
        self._job, self._began = job, time.monotonic()
        with suppress(BrokenPipeError):  # it has died: `take` returns the failure
            self.connection.send(job)

    def take(self) -> Outcome:
        """Return the outcome of the job, once the pipe has something to read."""
        assert self._job is not None
        try:
            outcome = self.connection.recv()
            assert isinstance(outcome, Outcome)
            return outcome
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            self.kill()
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            text = f"its process ended {how} (memory?)"
            failure = Failure(text, f"{text}\n")
            return Outcome(self._job.key, failure, time.monotonic() - self._began)

    def kill(self) -> None:
        """End the process at once."""
        self.alive = False
        self.connection.close()
        self._process.kill()
        self._process.join()
        self._process.close()


def _work(connection: Connection) -> None:
    """Run the jobs of a worker process until the other end of the pipe is closed."""
    # Ctrl-C reaches every process of the terminal; the parent stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Warnings of a library in one of many processes would break the progress line.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with suppress(EOFError, OSError):
        while True:
            connection.send(perform(connection.recv()))


def _end_with_parent() -> None:
    """End with the parent: without it no process takes the results, which may be paid."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
