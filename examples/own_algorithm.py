"""A custom method with `ask` and `tell`, compared with random search on the embedded model.

python examples/own_algorithm.py
fedone tune examples/own_algorithm.yaml

A method is a pure function of its state: `ask` returns prompts, the caller measures the loss of
each prompt, and `tell` returns the next state. For both methods the program prints the prompt, and
the accuracy on held-out rows before and after tuning with the same number of queries. In RUN.yaml
the method is `{name: own, object: "own_algorithm:HillClimb"}`; `fedone serve` also accepts it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedone_sdk import OnnxBackend, TaskSpec, Vocabulary, assets
from fedone_sdk.algorithms import (
    Algorithm,
    Candidates,
    ClassLosses,
    Holder,
    PlainAlgorithm,
    Space,
    State,
    make_method,
    stream,
)
from fedone_sdk.backends import predict
from fedone_sdk.data import load_examples

TASK = TaskSpec(
    template=" {text} It was{prompt} {mask}.", labels={0: " disappointing", 1: " great"}
)
WORDS = Vocabulary(candidates=("", " really", " not", " so", " just", " truly", " what", " a"))
POSITIONS, PROMPTS, STEPS, BATCH = 4, 8, 12, 16


@dataclass(frozen=True, kw_only=True)
class HillClimb(PlainAlgorithm):
    """Changes one position in copies of its prompt, and keeps the best of all.

    A run passes the fields below as arguments. The state is `alpha`. A method that must store more
    has named NumPy arrays in `State.memory`.
    """

    shares_memory: ClassVar[bool] = True

    prompt_len: int
    vocab_size: int
    num_samples: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of alpha: a row per position, with a 1 for the candidate in the prompt."""
        return self.prompt_len, self.vocab_size

    def init(self) -> State:
        """Return the state of the prompt with the first candidate at each position."""
        return self._at(np.zeros(self.prompt_len, dtype=np.int64))

    def prompt(self, state: State) -> NDArray[np.int64]:
        """Return the deployable prompt."""
        return np.asarray(state.alpha.argmax(axis=1), dtype=np.int64)

    def ask(
        self,
        state: State,
        rng: np.random.Generator,
        num_samples: int | None = None,
        holder: Holder | None = None,
    ) -> Candidates:
        """Return the prompt, and copies with one position changed; `holder` has no effect."""
        prompts = np.tile(self.prompt(state), (num_samples or self.num_samples, 1))
        for prompt in prompts[1:]:
            prompt[rng.integers(self.prompt_len)] = rng.integers(self.vocab_size)
        return Candidates(prompts=prompts, probabilities=state.alpha.astype(np.float64))

    def tell(self, state: State, candidates: Candidates, losses: ArrayLike | ClassLosses) -> State:
        """Return the state of the best prompt (at a tie, the first)."""
        if isinstance(losses, ClassLosses):
            raise ValueError("this method does not calibrate")
        return self._at(candidates.prompts[np.asarray(losses).argmin()])

    def _at(self, prompt: NDArray[np.int64]) -> State:
        return State(alpha=np.eye(self.vocab_size, dtype=np.float32)[prompt])


async def main() -> None:
    """Tune with both methods on the same mini-batches."""
    folder = assets.path("companion_feedback")
    train, dev = (list(load_examples(folder / f"{name}.jsonl")) for name in ("train", "dev"))
    ours = HillClimb(prompt_len=POSITIONS, vocab_size=len(WORDS), num_samples=PROMPTS)
    space = Space.repeated(POSITIONS, len(WORDS))
    theirs = make_method("random", space=space, num_samples=PROMPTS, seed=0)
    methods: dict[str, Algorithm] = {"hill climb": ours, "random search": theirs}
    async with OnnxBackend() as model:
        for name, method in methods.items():
            rng, state = stream(0), method.init()
            before = await predict(model, TASK, WORDS.text(method.prompt(state)), dev, BATCH)
            for _ in range(STEPS):
                rows = [train[row] for row in rng.choice(len(train), BATCH, replace=False)]
                candidates = method.ask(state, rng)
                found = [
                    await predict(model, TASK, WORDS.text(prompt), rows, BATCH)
                    for prompt in candidates.prompts
                ]
                state = method.tell(state, candidates, [each.mean_loss or 0.0 for each in found])
            text = WORDS.text(method.prompt(state))
            after = await predict(model, TASK, text, dev, BATCH)
            print(f"{name}: {text!r}, accuracy {before.metric:.3f} -> {after.metric:.3f}")


if __name__ == "__main__":
    asyncio.run(main())
