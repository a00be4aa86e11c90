"""Decides whether a model refuses one input, or every input of the same form.

Inputs have the same form if they differ only in the texts of their fields and prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import NoReturn

import structlog

from fedone_sdk.backends.base import Answer, Query
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import BackendRefused, FormBlocked

_log = structlog.get_logger(__name__)

_IN_A_ROW = 3
"""Refusals in a row after which the neutral input is sent, for a form that was answered before."""

_MAX_IN_A_ROW = {False: 16, True: 128}
"""Refusals in a row that block a form: 16 if it was never answered before, 128 if it was."""

_MAX_FORMS = 256  # Callers of a gateway may use different tasks.
_NEUTRAL = "text"


@dataclass(slots=True)
class _Form:
    answered: bool = False
    refused: int = 0  # Refusals in a row.
    # The devices whose inputs were refused in a row; None for other callers.
    devices: set[tuple[str, ...] | None] = field(default_factory=set)
    probe_at: int = 1  # Number of refusals after which the neutral input is sent next.
    is_probing: bool = False
    blocked: FormBlocked | None = None

    @property
    def unsure(self) -> bool:
        return self.blocked is None and self.refused >= (self.probe_at if self.answered else 1)

    @property
    def hopeless(self) -> bool:
        # The inputs of one device must not block the form for other devices.
        several = len(self.devices) > 1 or None in self.devices
        return several and self.refused >= _MAX_IN_A_ROW[self.answered]


class Refusals:
    """Tests after a refusal whether the model refuses every input of a form.

    The test is a neutral input, with a fixed word in place of the fields and the prompt. The test
    is sent after the first refusal. If an input of the form was answered before, the test is sent
    after `_IN_A_ROW` refusals in a row.

    - If the model answers the neutral input, only the refused inputs fail.
    - If the model refuses the neutral input, all requests of the form are refused until `reset`.
    - After `_MAX_IN_A_ROW` refusals in a row, all requests of the form are refused, too.

    Args:
        ask: Sends one request, and calls `admit` before each attempt.
    """

    def __init__(self, ask: Callable[[Query], Awaitable[Answer]]) -> None:
        self._ask = ask
        self._forms: OrderedDict[Query, _Form] = OrderedDict()
        self._logged: set[str] = set()

    @property
    def unsure(self) -> bool:
        """Whether a form may always be refused; requests are then sent one at a time."""
        return any(form.unsure for form in self._forms.values())

    def admit(self, query: Query) -> None:
        """Raise `FormBlocked` if every input of this form is refused."""
        if not any(form.blocked for form in self._forms.values()):
            return
        blocked = self._form(_neutral(query)).blocked
        if blocked is not None:  # A copy, because the traceback refers to private texts.
            raise FormBlocked(blocked.summary, usage=NOTHING, **blocked.private)

    async def run(self, query: Query) -> Answer:
        """Return the answer to a request, in which a refused input has None.

        Raises:
            BackendRefused: A request of several inputs was refused.
            FormBlocked: Every input of this form is refused.
        """
        neutral = _neutral(query)
        form = self._form(neutral)
        try:
            answer = await self._ask(query)
        except BackendRefused as exc:
            if len(query.inputs) > 1:
                raise
            form.devices.add(query.device)
            spent = await self._decide(form, neutral, exc)
            if exc.summary not in self._logged:  # Once per reason: there may be many inputs.
                self._logged.add(exc.summary)
                _log.warning("the model refused an input, which counts as failed", reason=str(exc))
            return failed(query, spent)
        form.answered, form.refused, form.probe_at = True, 0, _IN_A_ROW
        form.devices.clear()
        return answer

    def reset(self) -> None:
        """Forget all refusals and answers."""
        self._forms.clear()

    async def _decide(self, form: _Form, neutral: Query, refusal: BackendRefused) -> Usage:
        """Send the neutral input if it is due; return the usage of this and the refused request."""
        form.refused += 1
        spent = refusal.usage or NOTHING
        if form.hopeless:
            self._block(form, f"the model refused {form.refused} inputs in a row", refusal, spent)
        if form.is_probing or form.refused < form.probe_at:
            return spent
        form.is_probing = True
        try:
            spent += (await self._ask(neutral)).usage
        except BackendRefused as exc:
            spent += exc.usage or NOTHING
            self._block(form, "the model refuses every input, even a neutral one", exc, spent)
        finally:
            form.is_probing = False
        form.probe_at = max(_IN_A_ROW, 2 * form.refused)
        return spent

    def _block(self, form: _Form, what: str, refusal: BackendRefused, spent: Usage) -> NoReturn:
        form.blocked = FormBlocked(f"{what}: {refusal.summary}", usage=spent, **refusal.private)
        raise form.blocked from refusal

    def _form(self, neutral: Query) -> _Form:
        form = self._forms.get(neutral)
        if form is None:
            form = self._forms[replace(neutral, payer=None)] = _Form()
        self._forms.move_to_end(neutral)
        while len(self._forms) > _MAX_FORMS:
            self._forms.popitem(last=False)
        return form


def failed(query: Query, usage: Usage) -> Answer:
    """Return the answer to a query whose inputs all failed."""
    nothing = (None,) * len(query.inputs)
    return Answer(log_probs=nothing, texts=nothing if query.want == "text" else (), usage=usage)


def _neutral(query: Query) -> Query:
    parts = tuple(
        part._replace(text=_NEUTRAL) if part.kind in ("field", "prompt") else part
        for part in query.inputs[0]
    )
    return replace(query, inputs=(parts,), references=query.references and (_NEUTRAL,), scope=())
