"""Runs trials (such as a method with a seed) in processes or on Ray, and stores the results."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import structlog
from structlog.testing import capture_logs

import fedone_sdk
from fedone_sdk.errors import ArgumentError, FedOneError, needs_extra, one_line
from fedone_sdk.files import replace_file, sync_path

_log = structlog.get_logger(__name__)

__all__ = [
    "Progress",
    "Record",
    "Records",
    "Result",
    "Session",
    "Trial",
    "TrialFunction",
    "Workspace",
    "write_whole",
]

Result = dict[str, Any]
"""A trial's result as JSON values. The value of ``note``, if any, is shown when the trial ends."""

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=+-]{0,150}")
_DIGITS = 16
_THREADS = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *("MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
)
"""Variables that numerical libraries read when they are loaded."""

_QUIET_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # The default of later versions; avoids a warning.
    "RAY_DEDUP_LOGS": "0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """The inputs and the folder of a trial.

    Attributes:
        inputs: The trial's input files and folders by name.
        folder: The trial's folder, created by the first use of `file`. It keeps paid answers for
            the next attempt, and may be deleted at any time.
    """

    inputs: Mapping[str, Path]
    folder: Path
    context: Any = None

    def file(self, name: str) -> Path:
        """Return a file in the trial's folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / name


TrialFunction = Callable[[dict[str, Any], Workspace], Result]
"""Runs a trial in a separate process. It must be a function at the top level of a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One piece of work, such as one method on one task with one seed.

    Attributes:
        key: The trial's name, and the name of its result file.
        options: All values besides `inputs` on which the result depends, as JSON, without paths.
        inputs: The files and folders that the trial reads, by name.
        context: Other values for the function, pickled. They are not part of the identity.
        home: Name of the folder for the result; None means the `name` of `Records`.
    """

    key: str
    run: TrialFunction
    options: dict[str, Any]
    inputs: Mapping[str, Path] = field(default_factory=dict)
    context: Any = None
    home: str | None = None

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise ValueError(f"{self.key!r} is not a key of a trial: {_KEY.pattern}")

    def identity(self) -> str:
        """Return function, options and input digests as JSON; equal trials run only once."""
        return _canonical(self.function, self.options, self.digests())

    @property
    def function(self) -> str:
        """The module and name of `run`."""
        return f"{self.run.__module__}:{self.run.__qualname__}"

    def digests(self) -> dict[str, str]:
        """Return the digests of the inputs by name."""
        return {name: _digest(path) for name, path in self.inputs.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The result of a trial, as stored in a file."""

    key: str
    function: str
    options: dict[str, Any]
    inputs: dict[str, str]
    version: str
    wall_s: float
    result: Result

    @property
    def identity(self) -> str:
        """The identity of the trial (`Trial.identity`)."""
        return _canonical(self.function, self.options, self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of trials.

    Attributes:
        kept: Number of trials that do not run, because their results exist already.
        last: The key of the trial that has just ended; None at the beginning.
        failure: Why the last trial failed, one line; None if it did not.
        left_s: Estimated time of the remaining trials; None if unknown.
    """

    total: int
    kept: int
    done: int
    failed: int
    last: str | None = None
    failure: str | None = None
    note: str | None = None
    left_s: float | None = None

    @property
    def text(self) -> str:
        """The progress on one line."""
        kept = f" ({self.kept} were there already)" if self.kept else ""
        failed = f", {self.failed} failed" if self.failed else ""
        left = ""
        if self.left_s:
            short = self.left_s < 100
            left = f", {self.left_s:.0f} s left" if short else f", {self.left_s / 60:.0f} min left"
        last = f", last {self.last}" if self.last else ""
        return f"{self.done + self.failed} of {self.total} trials{kept}{failed}{left}{last}"


class Records:
    """The results in the folder `name` of `out`: one JSON file per trial, written atomically.

    The workspace of a trial depends only on its identity. If the same trial runs again
    under another `name`, it finds its paid answers there, and does not pay for them again.
    """

    def __init__(self, out: Path, name: str) -> None:
        self._out, self._name = out, name

    def find(self, trial: Trial) -> Record | None:
        """Return the record with the trial's identity."""
        identity = trial.identity()
        records = map(_read, (self._file(trial), self._renamed_file(trial, identity)))
        return next((one for one in records if one and one.identity == identity), None)

    def keep(self, trial: Trial, result: Result, wall_s: float) -> Record:
        """Write a trial's result.

        The file of this key may have a result with another identity (from a quick run or another
        model). That file is then renamed first, and `find` still finds it.
        """
        record = Record(
            key=trial.key,
            function=trial.function,
            options=trial.options,
            inputs=trial.digests(),
            version=fedone_sdk.__version__,
            wall_s=round(wall_s, 3),
            result=result,
        )
        text = json.dumps(asdict(record), indent=1, ensure_ascii=False, allow_nan=False)
        before = _read(self._file(trial))
        if before is not None and before.identity != record.identity:
            with suppress(FileNotFoundError):  # Another process has renamed it.
                self._file(trial).replace(self._renamed_file(trial, before.identity))
        write_whole(self._file(trial), text + "\n")
        self._failure_file(trial).unlink(missing_ok=True)
        return record

    def keep_failure(self, trial: Trial, text: str) -> None:
        """Write why a trial failed."""
        write_whole(self._failure_file(trial), text)

    def workspace(self, trial: Trial) -> Workspace:
        """Return the trial's inputs and folder, which depends on its identity only."""
        return Workspace(
            inputs={name: path.absolute() for name, path in trial.inputs.items()},
            folder=(self._out / "answers" / _short(trial.identity())).absolute(),
            context=trial.context,
        )

    def _file(self, trial: Trial) -> Path:
        return self._out / (trial.home or self._name) / "trials" / f"{trial.key}.json"

    def _renamed_file(self, trial: Trial, identity: str) -> Path:
        return self._file(trial).with_name(f"{trial.key}~{_short(identity)}.json")

    def _failure_file(self, trial: Trial) -> Path:
        return self._file(trial).with_suffix(".failed.txt")


class Session:
    """Runs trials, and collects their records and failures by key.

    Args:
        records: The stored results.
        workers: Number of concurrent trials on this machine, each on one of the GPUs in
            CUDA_VISIBLE_DEVICES. None means one per GPU, or one per core if there is no GPU.
        ray: Address of a Ray cluster for the trials; ``local`` starts a cluster on this machine,
            None uses processes.
        watch: Called when a trial ends.
    """

    def __init__(
        self,
        records: Records,
        *,
        workers: int | None = None,
        ray: str | None = None,
        watch: Callable[[Progress], None] | None = None,
    ) -> None:
        self.records: dict[str, Record] = {}
        self.failures: dict[str, str] = {}
        self.kept = 0
        self._store, self._ray, self._watch = records, ray, watch
        self._workers = workers or len(_gpus()) or os.cpu_count() or 1
        self._seen: set[str] = set()
        self._logged: list[Mapping[str, str]] = []
        self._began = time.monotonic()

    @property
    def results(self) -> dict[str, Result]:
        """The results by key."""
        return {key: record.result for key, record in self.records.items()}

    def find(self, trials: Sequence[Trial]) -> list[Trial]:
        """Read existing results, and return the trials without a result."""
        if len({trial.key for trial in trials}) < len(trials):
            raise ValueError("two trials share a key")
        missing = []
        for trial in trials:
            if trial.key in self._seen:
                continue
            if (record := self._store.find(trial)) is None:
                missing.append(trial)
            else:
                self.records[trial.key] = record
                self.kept += 1
        self._seen.update(trial.key for trial in trials)
        return missing

    def run(self, trials: Sequence[Trial], *, stop_at_failure: bool = False) -> None:
        """Run trials that `find` returned, and keep their results."""
        self._began = time.monotonic()
        self._report_progress(None)
        by_key = {trial.key: trial for trial in trials}
        jobs = [(trial, self._store.workspace(trial)) for trial in trials]
        if self._ray is None:
            outcomes = _in_processes(jobs, self._workers)
        else:
            outcomes = _on_ray(jobs, self._workers, self._ray)
        # Ctrl-C also closes the iterator. Running trials are then stopped.
        with closing(outcomes):
            for outcome in outcomes:
                self._keep(by_key[outcome.key], outcome)
                self._report_progress(outcome.key)
                if stop_at_failure and outcome.key in self.failures:
                    return

    def _keep(self, trial: Trial, outcome: _Outcome) -> None:
        for warning in outcome.warnings:
            if warning not in self._logged:  # Each trial may log the same warning.
                self._logged.append(warning)
                _log.warning(**warning)
        result = outcome.result
        if not isinstance(result, _Failure):
            try:
                self.records[trial.key] = self._store.keep(trial, result, outcome.wall_s)
                return
            except (TypeError, ValueError) as exc:
                text = f"its result is not a JSON value: {exc}"
                result = _Failure(text, f"{text}\n{result!r}\n")
        self.failures[trial.key] = result.message
        self._store.keep_failure(trial, result.details)

    def _report_progress(self, last: str | None) -> None:
        if self._watch is None:
            return
        record, ended = self.records.get(last or ""), len(self.records) + len(self.failures)
        new, seconds = ended - self.kept, time.monotonic() - self._began
        self._watch(
            Progress(
                total=len(self._seen),
                kept=self.kept,
                done=len(self.records),
                failed=len(self.failures),
                last=last,
                failure=self.failures.get(last or ""),
                note=None if record is None else record.result.get("note"),
                left_s=seconds * (len(self._seen) - ended) / new if new else None,
            )
        )


_Job = tuple[Trial, Workspace]


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    details: str


@dataclass(frozen=True, slots=True)
class _Outcome:
    key: str
    result: Result | _Failure
    wall_s: float
    warnings: Sequence[Mapping[str, str]] = ()


def _perform(trial: Trial, workspace: Workspace) -> _Outcome:
    began = time.monotonic()
    result: Result | _Failure
    with capture_logs() as logged:
        try:
            result = trial.run(trial.options, workspace)
        except Exception as exc:
            text = one_line(exc)
            message = text if isinstance(exc, FedOneError) else f"{type(exc).__name__}: {text}"
            result = _Failure(message, traceback.format_exc())
    warnings = [
        {name: str(value) for name, value in entry.items() if name != "log_level"}
        for entry in logged
        if entry["log_level"] == "warning"
    ]
    return _Outcome(trial.key, result, time.monotonic() - began, warnings)


def _gpus() -> list[str]:
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


def _in_processes(jobs: Iterable[_Job], workers: int) -> Generator[_Outcome]:
    """Run jobs in at most `workers` processes, and yield outcomes as they arrive.

    If a process dies, its trial counts as failed, and a new process is started. Closing the
    iterator kills running jobs.
    """
    waiting = deque(jobs)
    at_work: dict[Connection, _Worker] = {}
    idle: list[_Worker] = []
    threads = max(1, (os.cpu_count() or 1) // workers)
    try:
        while waiting or at_work:
            while waiting and len(at_work) < workers:
                used = [worker.gpu for worker in at_work.values()]
                gpu = min(_gpus(), key=used.count, default=None)
                worker = idle.pop() if idle else _Worker(threads, gpu)
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
    def __init__(self, threads: int, gpu: str | None = None) -> None:
        # Not a fork: a process with threads must not be copied.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_work, args=(theirs,), name="fedone-trial", daemon=True
        )
        self.gpu = gpu
        changed = dict.fromkeys(_THREADS, str(threads))
        if gpu is not None:
            changed["CUDA_VISIBLE_DEVICES"] = gpu
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            self._process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
        theirs.close()
        self.alive = True
        self._job: _Job | None = None
        self._began = 0.0

    def give(self, job: _Job) -> None:
        self._job, self._began = job, time.monotonic()
        with suppress(BrokenPipeError):  # The process has died; `take` returns the failure.
            self.connection.send(job)

    def take(self) -> _Outcome:
        assert self._job is not None
        try:
            outcome = self.connection.recv()
            assert isinstance(outcome, _Outcome)
            return outcome
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            self.kill()
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            text = f"its process ended {how} (out of memory?)"
            wall_s = time.monotonic() - self._began
            return _Outcome(self._job[0].key, _Failure(text, f"{text}\n"), wall_s)

    def kill(self) -> None:
        self.alive = False
        self.connection.close()
        self._process.kill()
        self._process.join()
        self._process.close()


def _work(connection: Connection) -> None:
    # Ctrl-C reaches every process of the terminal. Workers ignore it: the parent stops them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            connection.send(_perform(*connection.recv()))


def _end_with_parent() -> None:
    """Exit when the parent exits, because nothing would store the results of further calls."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _on_ray(jobs: Iterable[_Job], workers: int, address: str) -> Generator[_Outcome]:
    """Run jobs as tasks of Ray, one CPU each, and yield outcomes as they arrive.

    Inputs and the output folder must have the same paths on all nodes.
    """
    os.environ.update(_QUIET_RAY)
    with needs_extra("--ray", "ray"):
        import ray
    options: dict[str, Any] = {}
    if address == "local":
        options = {"num_cpus": workers, "include_dashboard": False}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": dict.fromkeys(_THREADS, "1")},
            **options,
        )
    except (ConnectionError, RuntimeError, ValueError) as exc:
        raise ArgumentError(f"--ray: no Ray cluster: {exc}") from exc
    try:
        # Replace Ray's handler, which would abort this process in the middle of its work.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        task = ray.remote(num_cpus=1, max_retries=0)(_perform)
        keys = {task.remote(trial, workspace): trial.key for trial, workspace in jobs}
        while keys:
            (done, *_), _ = ray.wait(list(keys))
            key = keys.pop(done)
            try:
                outcome: _Outcome = ray.get(done)
            except ray.exceptions.RayError as exc:  # The process or node died.
                text = f"{type(exc).__name__}: {' '.join(str(exc).split())}"
                outcome = _Outcome(key, _Failure(text, f"{exc}\n"), 0.0)
            yield outcome
    finally:
        ray.shutdown()


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file and the folders above it atomically, and sync them to the disk."""
    new = [folder for folder in file.parents if not folder.exists()]
    file.parent.mkdir(parents=True, exist_ok=True)
    for folder in new:
        sync_path(folder.parent)
    replace_file(file, content.encode() if isinstance(content, str) else content)


def _read(file: Path) -> Record | None:
    try:
        return Record(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, RecursionError, TypeError, ValueError):
        return None


def _short(identity: str) -> str:
    return hashlib.sha256(identity.encode()).hexdigest()[:_DIGITS]


def _canonical(*parts: Any) -> str:
    return json.dumps(parts, sort_keys=True, ensure_ascii=False)


def _digest(path: Path) -> str:
    try:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        total = hashlib.sha256()
        for file in files:
            stat = file.stat()
            name = file.relative_to(path).as_posix()
            content = _file_digest(file, stat.st_size, stat.st_mtime_ns)
            total.update(f"{name}\0{content}\n".encode())
    except OSError as exc:
        raise ArgumentError(f"{path}: cannot be read: {exc.strerror}") from exc
    return total.hexdigest()[:_DIGITS]


@cache
def _file_digest(file: Path, size: int, mtime_ns: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
