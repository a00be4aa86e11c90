"""The gateway: devices that hold no key ask the model through the server, under their lease."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from dataclasses import dataclass

from fedone_sdk.aggregator.events import GatewayAnswered, GatewayAsked
from fedone_sdk.aggregator.run import ServedRun
from fedone_sdk.aggregator.state import Seat
from fedone_sdk.backends import Answer, LLMBackend, Query
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError, BackendUnavailable, ProblemError
from fedone_sdk.messages import Array, Score, Scores
from fedone_sdk.messages.ndarray import from_wire
from fedone_sdk.task import render

__all__ = ["Gateway"]


@dataclass(slots=True)
class _Call:
    """One request of a client: the task that answers it, and whether its queries were charged."""

    task: asyncio.Task[Scores] | None = None
    charged: bool = False


class Gateway:
    """Scores prompts for clients; what it asks is reserved before and settled after.

    A repeated request is answered from memory and charged once. After a restart the memory is
    gone, and a repeated request is charged again or refused: the model is never asked for more
    queries than were charged.

    Args:
        backend: The model.
    """

    def __init__(self, backend: LLMBackend) -> None:
        self.backend = backend
        self._calls: dict[str, dict[str, _Call]] = defaultdict(dict)

    async def score(self, run: ServedRun, seat: Seat, message: Score, body_sha256: str) -> Scores:
        """Answers a client's request.

        Raises:
            ProblemError: The request does not fit the assignment, or the model failed.
        """
        call = self._calls[message.assignment_id].get(body_sha256, _Call())
        # No await from here to the task: the same request sent twice at once is one call.
        if call.task is None or _failed(call.task):
            queries = self._queries(run, self._prompts(run, seat, message), message)
            self._calls[message.assignment_id][body_sha256] = call
            call.task = asyncio.create_task(
                self._ask(run, message.assignment_id, queries, call),
                name=f"gateway {message.assignment_id}",
            )
            # A device that goes away never fetches the failure of its call.
            call.task.add_done_callback(_failed)
        # Shielded: the answer is paid for, and a device that comes back shall have it.
        return await asyncio.shield(call.task)

    def forget(self, assignment_id: str) -> None:
        """Drops what is remembered for work that has ended."""
        self._calls.pop(assignment_id, None)

    async def stop(self) -> None:
        """Ends the calls under way; they are charged in full."""
        tasks = [call.task for calls in self._calls.values() for call in calls.values()]
        waiting = [task for task in tasks if task is not None and not task.done()]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    @staticmethod
    def _prompts(run: ServedRun, seat: Seat, message: Score) -> list[list[int]]:
        if message.prompts is None:
            if run.spec.participation.exchange != "losses":
                raise ProblemError("invalid_message", "prompts: are required in this exchange")
            drawn: list[list[int]] = run.machine.candidates(run.state, seat).indices.tolist()
            return drawn
        array = message.prompts
        length, vocab_size = run.spec.prompt.length, len(run.vocabulary)
        leased = seat.num_samples * seat.num_steps
        if array.dtype.startswith("float") or len(array.shape) != 2 or array.shape[1] != length:
            raise ProblemError(
                "invalid_message",
                f"prompts: are {array.dtype} {list(array.shape)}, must be integers [P, {length}]",
            )
        if array.shape[0] > leased:
            raise ProblemError(
                "lease_exhausted", f"{array.shape[0]} queries asked, the lease has {leased}"
            )
        indices = from_wire(array)
        if not indices.size or not 0 <= indices.min() <= indices.max() < vocab_size:
            raise ProblemError("invalid_message", f"prompts: indices must be below {vocab_size}")
        rows: list[list[int]] = indices.tolist()
        return rows

    @staticmethod
    def _queries(run: ServedRun, prompts: list[list[int]], message: Score) -> list[Query]:
        task, batch_size = run.spec.task, run.spec.method.batch_size
        if len(message.examples) > batch_size:
            raise ProblemError(
                "invalid_message",
                f"examples: {len(message.examples)} were sent, a mini-batch has at most "
                f"{batch_size}",
            )
        for number, example in enumerate(message.examples):
            if example.keys() != set(task.fields):
                raise ProblemError(
                    "invalid_message",
                    f"examples.{number}: has the fields {sorted(example)}, the task's are "
                    f"{list(task.fields)}",
                )
        texts = [run.vocabulary.text(indices) for indices in prompts]
        return [
            Query(
                inputs=tuple(render(task, text, example) for example in message.examples),
                label_words=task.label_words,
            )
            for text in texts
        ]

    async def _ask(
        self, run: ServedRun, assignment_id: str, queries: list[Query], call: _Call
    ) -> Scores:
        worst = run.machine.worst_query * len(queries)
        if call.charged:
            # A retry of a failed call bills again, but is no new logical query.
            worst = worst.without_queries()
        await run.apply(GatewayAsked(assignment_id=assignment_id, worst=worst))
        call.charged = True
        used = worst  # what a failed call cost is unknown, so it is charged in full
        try:
            answers = await asyncio.gather(*(self.backend.score(query) for query in queries))
            used = sum(
                (answer.usage.without_queries() for answer in answers),
                Usage(queries=worst.queries),
            )
        except BackendUnavailable as exc:
            raise ProblemError("backend_unavailable", str(exc)) from exc
        except BackendError as exc:
            raise ProblemError("backend_failed", str(exc)) from exc
        finally:
            await run.apply(GatewayAnswered(assignment_id=assignment_id, worst=worst, used=used))
        run.counters.cache_hits += sum(answer.cached for answer in answers)
        return _scores(answers, len(run.spec.task.label_words), self.backend.fingerprint)


def _scores(answers: list[Answer], num_labels: int, model: str) -> Scores:
    batch_size = len(answers[0].log_probs)
    failed = tuple(
        (p, b)
        for p, answer in enumerate(answers)
        for b, row in enumerate(answer.log_probs)
        if row is None
    )
    nothing = (0.0,) * num_labels
    rows = (row or nothing for answer in answers for row in answer.log_probs)
    return Scores(
        log_probs=Array.pack(
            itertools.chain.from_iterable(rows), (len(answers), batch_size, num_labels), "float32"
        ),
        failed=failed,
        model=model,
    )


def _failed(call: asyncio.Task[Scores]) -> bool:
    return call.done() and (call.cancelled() or call.exception() is not None)
