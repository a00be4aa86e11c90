"""Checks that the gateway's model supports a run."""

from __future__ import annotations

import structlog

from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.serving.run import ServedRun
from fedone_sdk.aggregator.serving.run_view import reasons
from fedone_sdk.backends import LLMBackend, query_for
from fedone_sdk.backends.label_words import check_label_words
from fedone_sdk.budget import Usage
from fedone_sdk.candidates import label_checks, no_prompt
from fedone_sdk.errors import BackendError, BackendUnavailable, ProblemError, SpecError
from fedone_sdk.spec import RunSpec
from fedone_sdk.vocabulary import Vocabulary

_log = structlog.get_logger(__name__)


class ModelChecks:
    """Checks the gateway's model for runs, and sets it in their machines."""

    def __init__(self, backend: LLMBackend | None) -> None:
        self._backend = backend

    def reset(self) -> None:
        """Query a model again that has refused all requests."""
        if self._backend is not None:
            self._backend.reset()

    def machine(self, run_id: str, spec: RunSpec, vocabulary: Vocabulary) -> RoundMachine:
        """Return the machine of a run, before the model is known."""
        gateway_model = None if self._backend is None else ""
        try:
            return RoundMachine.of(run_id, spec, vocabulary, gateway_model=gateway_model)
        except ValueError as exc:
            raise SpecError(f"method: {exc}") from exc

    async def with_model(self, machine: RoundMachine, vocabulary: Vocabulary) -> RoundMachine:
        """Check that the model supports a run; return the machine with the model's facts.

        Raises:
            SpecError: The model does not support the run.
            BackendError: The model is not available.
        """
        spec, backend = machine.spec, self._backend
        if backend is None:
            spec.check_caps({"queries"})
            if spec.participation.model is None:
                raise SpecError(
                    "participation.model: is missing; a run without a backend of the server names "
                    "the fingerprint of the devices' model"
                )
            return machine
        # First: some backends know their capabilities only after a request.
        for words, form in label_checks(spec.task, vocabulary):
            await check_label_words(backend, words, form)
        spec.check_caps(backend.bounds)
        # Reports an unsupported template once, rather than in every query.
        nothing = dict.fromkeys(spec.task.fields, "")
        bare = no_prompt(spec.task, vocabulary)
        query = query_for(spec.task, bare, [nothing], backend=backend, references=["a"])
        await backend.quote(query)
        return machine.with_model(backend.fingerprint, _worst_query(spec, backend))

    async def probe(self, run: ServedRun) -> None:
        """Check the model for a run that is served, and use what it reports.

        Raises:
            SpecError: The model does not support the run, or is not the required one.
            BackendError: The model is not available.
        """
        run.base = await self.with_model(run.base, run.vocabulary)
        check_required_model(run.base)

    async def ensure(self, run: ServedRun) -> None:
        """Check the model of a run that was loaded while the model was unavailable.

        Another replica may have resumed the run since. If the model's bills have raised its quotes,
        later leases cover that.

        Raises:
            ProblemError: The model is still unavailable.
        """
        base = run.base
        if base.gateway_model == "":
            try:
                await self.probe(run)
            except (BackendError, SpecError) as exc:
                # The cause is only logged: the response goes to devices.
                _log.warning("the model is not available", run_id=run.run_id, reason=str(exc))
                raise ProblemError(
                    "backend_unavailable", "the model is not available at the moment"
                ) from exc
        elif self._backend is not None and base.gateway_model is not None:
            worst_query = _worst_query(run.spec, self._backend)
            if worst_query != base.worst_query:
                run.base = base.with_model(base.gateway_model, worst_query)

    async def check_available(self, run: ServedRun) -> None:
        """Check the model of a run that a user resumes.

        Raises:
            ProblemError: ``backend_blocked`` or ``backend_unavailable``.
        """
        try:
            await self.probe(run)
        except (BackendError, SpecError) as exc:
            passes = isinstance(exc, BackendUnavailable)
            code = "backend_unavailable" if passes else "backend_blocked"
            raise ProblemError(code, reasons(exc)[0]) from exc


def _worst_query(spec: RunSpec, backend: LLMBackend) -> Usage:
    return backend.worst_case(spec.method.batch_size, spec.task.max_written)


def check_required_model(machine: RoundMachine) -> None:
    """Refuse a run whose ``participation.model`` is not the server's model."""
    required, served = machine.spec.participation.model, machine.gateway_model
    if served is not None and required not in (None, served):
        raise SpecError(f"participation.model: is {required!r}, the server's model is {served!r}")
