"""The expected loss of prompts drawn from alpha, and the loss of the deployable one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from fedone_sdk.errors import BackendError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedone_sdk.algorithms import Method, State
    from fedone_sdk.backends import LLMBackend, Show
    from fedone_sdk.spec import RunSpec
    from fedone_sdk.task import Example
    from fedone_sdk.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Probing:
    """The measurements of a run. Training does not use them, and its query count excludes them.

    Attributes:
        queries: Training queries between two measurements; rounded down to whole rounds, at least
            one round.
        prompts: Prompts drawn from alpha.
        rows: Dev rows that each of them is measured on, a separate draw.
        prompt_rows: Dev rows that the deployable prompt is measured on.
        gains: The targets: how far each named loss must come below the untrained expected loss
            (without one, below that of the untrained prompt), nats. The run ends when all are
            reached; with none it continues to its end.
    """

    queries: int = 100
    prompts: int = 64
    rows: int = 16
    prompt_rows: int = 128
    gains: Mapping[str, float] = field(default_factory=dict)


class Probe:
    """Measurements of the states of one run, on the same dev rows and with the same noise.

    Args:
        spec: The run.
        method: Its method.
        backend: The model.
        show: How the method's prompts look to it.
        dev: Held-out rows.
        probing: How much is measured.

    Attributes:
        asked: Queries to the model so far, with known answers.
    """

    def __init__(
        self,
        spec: RunSpec,
        method: Method,
        *,
        backend: LLMBackend,
        show: Show,
        dev: Sequence[Example],
        probing: Probing,
    ) -> None:
        from fedone_sdk.algorithms import stream_seed
        from fedone_sdk.data import draw_minibatch

        def rows(purpose: str, number: int, count: int) -> list[Example]:
            drawn = draw_minibatch(len(dev), count, stream_seed(spec.seed, purpose, 0, number))
            return [dev[index] for index in drawn]

        self.asked = 0
        self._backend = backend
        self._show = show
        self._task = spec.task
        self._method = method
        self._noise = noises(method.shape, count=probing.prompts, seed=spec.seed)
        self._rows = [rows("probe-rows", n, probing.rows) for n in range(probing.prompts)]
        self._prompt_rows = rows("probe-prompt-rows", 0, probing.prompt_rows)

    @classmethod
    async def of(
        cls, spec: RunSpec, vocabulary: Vocabulary, method: Method, **settings: Any
    ) -> Self:
        """The probe of a run.

        Raises:
            BackendError: The model cannot be queried.
            SpecError: The model takes no such prompts.
        """
        from fedone_sdk.backends import shown_by

        show = await shown_by(
            spec.method,
            prompt_len=spec.prompt.length,
            task=spec.task,
            vocabulary=vocabulary,
            backend=settings["backend"],
        )
        return cls(spec, method, show=show, **settings)

    async def measure(self, state: State, *, domain: str = "tokens") -> dict[str, float]:
        """Measure a state.

        Args:
            state: The state.
            domain: Of the method's spec. Only where alpha is a distribution over ``tokens`` is
                there something to expect.

        Returns:
            ``prompt_loss`` (nats) and ``prompt_metric`` (the task's) of the deployable prompt;
            ``expected_loss`` and ``expected_metric`` over prompts drawn from alpha.

        Raises:
            BackendError: The model refused a query.
        """
        found: dict[str, float] = {}
        if domain == "tokens":
            prompts = sampled(state.alpha, self._noise)
            loss, metric = await self._ask(list(prompts), self._rows)
            found |= {"expected_loss": loss, "expected_metric": metric}
        loss, metric = await self._ask([self._method.prompt(state)], [self._prompt_rows])
        return {**found, "prompt_loss": loss, "prompt_metric": metric}

    async def _ask(
        self, prompts: Sequence[NDArray[np.int64]], rows: Sequence[list[Example]]
    ) -> tuple[float, float]:
        from fedone_sdk.backends import Prediction, prediction_queries, score_all

        queries = [
            query
            for prompt, held in zip(prompts, rows, strict=True)
            for query in prediction_queries(
                self._backend, self._task, self._show(prompt.tolist()), held, len(held)
            )
        ]
        answers = await score_all(self._backend, queries)
        self.asked += len(queries)
        together = [row for held in rows for row in held]
        found = Prediction.of(self._task, queries, answers, together)
        loss, metric = found.mean_loss, found.metric
        if loss is None or metric is None:
            raise BackendError("the model answered none of the probe's inputs")
        return loss, metric


def noises(shape: tuple[int, int], *, count: int, seed: int) -> NDArray[np.float32]:
    """The Gumbel noises of `count` prompts, shape (count, n, N).

    Args:
        shape: n and N.
        count: How many.
        seed: Of the run.
    """
    import numpy as np

    from fedone_sdk.algorithms import stream, stream_seed

    generator = stream(stream_seed(seed, "probe", 0))
    return generator.gumbel(size=(count, *shape)).astype(np.float32)


def sampled(alpha: NDArray[np.float32], noise: NDArray[np.float32]) -> NDArray[np.int64]:
    """Prompts drawn from the rows of alpha by the Gumbel-max rule, shape (count, n).

    Under the same noise, a prompt stays the same until a token's share has really moved: the
    difference of two measurements is then that of the alphas, and most answers are known already.

    Args:
        alpha: Shape (n, N), positive.
        noise: Shape (count, n, N).
    """
    import numpy as np

    drawn: NDArray[np.int64] = (np.log(alpha) + noise).argmax(axis=2).astype(np.int64)
    return drawn
