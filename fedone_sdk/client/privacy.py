"""The epsilon that a device has spent, and its limit."""

from __future__ import annotations

import math

import structlog

from fedone_sdk.accountant import GaussianAccountant
from fedone_sdk.budget import Usage
from fedone_sdk.client.examples import Declining, Unfit
from fedone_sdk.client.journal import Journal
from fedone_sdk.client.state import DeviceState, Precision
from fedone_sdk.errors import ArgumentError, DataError
from fedone_sdk.messages import AlphaAssignment, LossesAssignment, RunTask
from fedone_sdk.spec.sections import PrivacySpec, RequiredPrivacy

_log = structlog.get_logger(__name__)


_SPENT = "the client's epsilon does not suffice for this work"


class PrivacyAccount:
    """Counts the noised releases of one device, over all its runs and servers.

    A release and its count are stored in one transaction, before the release is sent.

    Args:
        own_model: Whether a model on the device sees the texts, rather than the gateway.

    Raises:
        DataError: The count cannot be read.
        MissingExtraError: dp-accounting is not installed.
        SpecError: There is no folder, or the gateway would see the protected data.
    """

    def __init__(self, required: RequiredPrivacy, state: DeviceState, *, own_model: bool) -> None:
        if state.file is None:
            raise ArgumentError("policy.privacy: needs state_dir, which keeps the count of epsilon")
        if required.unit != "label" and not own_model:
            raise ArgumentError(
                f"policy.privacy: unit {required.unit!r} needs a backend of the device's own, "
                "because the gateway sees the texts; unit 'label' protects labels only"
            )
        self.required = required
        self._own_model = own_model
        self._accountant = GaussianAccountant(required.delta)
        self._state = state
        self._given = state.precisions()

    @property
    def epsilon(self) -> float:
        """The epsilon spent so far, at the required delta."""
        return self._epsilon(self._given)

    def check(
        self, run: RunTask, assignment: AlphaAssignment | LossesAssignment, journal: Journal
    ) -> None:
        """Check that an assignment meets the device's requirements.

        Raises:
            Unfit: It does not.
        """
        privacy = self.check_run(run)
        steps = len(assignment.steps) if isinstance(assignment, AlphaAssignment) else 1
        if not self._own_model and privacy.target == "alpha" and steps > 1:
            # The prompts of a later step reveal the alpha of the step before, without noise.
            raise Unfit("the client's labels are private: one local step at most")
        total = steps if privacy.target == "losses" else 1
        self._afford(privacy, max(total - journal.releases, 0))

    def check_run(self, run: RunTask) -> PrivacySpec:
        """Return a run's privacy after checking it against the device's requirements.

        Raises:
            Unfit: It does not meet them.
        """
        required, privacy = self.required, run.privacy
        if privacy is None:
            raise Unfit("the client requires noise, and the run asks for none")
        least = required.min_noise_multiplier
        if least is not None and privacy.noise_multiplier < least:
            raise Unfit(
                f"the client requires a noise multiplier of at least {least:g}, and the run's is "
                f"{privacy.noise_multiplier:g}"
            )
        if required.unit == "device" and privacy.target != "alpha":
            raise Unfit("the client requires target alpha, which protects all that it holds")
        if not self._own_model and run.task.loss == "nll":
            raise Unfit("the client's labels are private, and loss nll sends them")
        return privacy

    def charge(self, privacy: PrivacySpec) -> Precision:
        """Return what counts one release; it is stored with the release.

        Raises:
            Declining: The count cannot be read.
            Unfit: The release would exceed the required epsilon.
        """
        self._afford(privacy, 1)
        return privacy.target, privacy.noise_multiplier**-2

    def update(self) -> None:
        """Read the count, for `epsilon`."""
        try:
            given = self._state.precisions()
        except DataError as exc:
            _log.warning("the count of epsilon cannot be read", reason=str(exc))
            return
        if given != self._given:
            self._given = given
            _log.info("privacy spent", epsilon=self.epsilon, max_epsilon=self.required.max_epsilon)

    def shown(self, usage: Usage) -> Usage:
        """Return the usage that the server may see: one request per query.

        Tokens reveal texts, and further requests reveal which rows the model refuses.
        """
        if not self._own_model:
            return usage
        return Usage(queries=usage.queries, requests=usage.queries)

    def _afford(self, privacy: PrivacySpec, releases: int) -> None:
        try:
            self._given = self._state.precisions()
        except DataError as exc:  # Its text has a path, which does not leave the device.
            _log.warning("the count of epsilon cannot be read", reason=str(exc))
            raise Declining("the client's count of epsilon cannot be read") from exc
        target = privacy.target
        precision = self._given.get(target, 0.0) + releases / privacy.noise_multiplier**2
        epsilon, most = self._epsilon({**self._given, target: precision}), self.required.max_epsilon
        if epsilon > most:
            raise Unfit(
                _SPENT,  # The figures would tell of other servers' runs.
                shown=f"{_SPENT}: at most {most:g} at delta {self.required.delta:g}, "
                f"{self.epsilon:.4g} is spent, {epsilon:.4g} it would be",
            )

    def _epsilon(self, given: dict[str, float]) -> float:
        if self.required.unit == "device" and given.get("losses"):
            return math.inf  # Those releases protected single examples only.
        return self._accountant.epsilon(sum(given.values()))
