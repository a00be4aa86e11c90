"""Trials on a Ray cluster."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

from fedone_paper.pool import ONE_THREAD, Failure, Job, Outcome, perform
from fedone_sdk.errors import ArgumentError, needs_extra

if TYPE_CHECKING:
    from collections.abc import Mapping

_QUIET: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",  # it would report to its makers
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # as it will be, instead of a warning that it will
    "RAY_DEDUP_LOGS": "0",
}


def run_on_ray(jobs: Iterable[Job], workers: int, *, address: str) -> Generator[Outcome]:
    """Run jobs as tasks of Ray, one CPU each, and yield outcomes as they arrive.

    The nodes of a cluster must see inputs and the output folder under the same paths.

    Args:
        jobs: The trials.
        address: Of the cluster; ``local`` starts one here.
        workers: CPUs of a cluster that is started here; one that runs already has its own.

    Raises:
        MissingExtraError: Ray is not installed.
        SpecError: The cluster cannot be reached.
    """
    os.environ.update(_QUIET)
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
            runtime_env={"env_vars": dict.fromkeys(ONE_THREAD, "1")},
            **options,
        )
    except (ConnectionError, RuntimeError, ValueError) as exc:
        raise ArgumentError(f"--ray: no Ray cluster: {exc}") from exc
    try:
        # The handler that Ray installs aborts this process in the middle of its work.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        task = ray.remote(num_cpus=1, max_retries=0)(perform)
        keys = {task.remote(job): job.key for job in jobs}
        while keys:
            (done, *_), _ = ray.wait(list(keys))
            key = keys.pop(done)
            try:
                outcome: Outcome = ray.get(done)
            except ray.exceptions.RayError as exc:  # its process or its node died
                text = f"{type(exc).__name__}: {' '.join(str(exc).split())}"
                outcome = Outcome(key, Failure(text, f"{exc}\n"), 0.0)
            yield outcome
    finally:
        ray.shutdown()
