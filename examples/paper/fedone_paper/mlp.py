"""The toy's network: one hidden layer with dropout, softmax at the end, plain SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedone_paper.digits import NUM_CLASSES

Floats = NDArray[np.floating]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """Inputs - ReLU layer - dropout - classes. Parameters are one vector, so that they average.

    A function of its arguments alone: nothing is kept, and no input is changed. It computes in the
    parameters' dtype. Images have the shape (rows, num_inputs), labels (rows,), parameters (size,).

    Attributes:
        num_inputs: Pixels.
        num_hidden: Width of the hidden layer.
        num_classes: Outputs.
        dropout: Probability that a hidden unit is left out of one training step.
    """

    num_inputs: int
    num_hidden: int = 512
    num_classes: int = NUM_CLASSES
    dropout: float = 0.2

    @property
    def size(self) -> int:
        """Length of the parameter vector."""
        hidden = (self.num_inputs + 1) * self.num_hidden
        return hidden + (self.num_hidden + 1) * self.num_classes

    def init(self, rng: np.random.Generator) -> NDArray[np.float32]:
        """Draws parameters: uniform within 1/sqrt(inputs of the layer), as torch's linear layer."""
        hidden = (self.num_inputs + 1) * self.num_hidden
        scales = np.repeat(
            [1 / math.sqrt(self.num_inputs), 1 / math.sqrt(self.num_hidden)],
            [hidden, self.size - hidden],
        )
        drawn: NDArray[np.float32] = ((2 * rng.random(self.size) - 1) * scales).astype(np.float32)
        return drawn

    def draw_mask(self, num_rows: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """Draws which hidden units stay, already divided by the probability that they do.

        Returns:
            Shape (num_rows, num_hidden).
        """
        stays = rng.random((num_rows, self.num_hidden), dtype=np.float32) >= self.dropout
        return stays.astype(np.float32) / np.float32(1 - self.dropout)

    def predict(self, parameters: Floats, images: Floats) -> NDArray[np.int64]:
        """Return the likeliest class of each image; without dropout."""
        w1, b1, w2, b2 = self._layers(parameters)
        scores = np.maximum(images @ w1 + b1, 0) @ w2 + b2
        classes: NDArray[np.int64] = np.argmax(scores, axis=1)
        return classes

    def loss_and_gradient(
        self, parameters: Floats, images: Floats, labels: NDArray[np.int64], mask: Floats
    ) -> tuple[float, Floats]:
        """Return the mean cross-entropy of a mini-batch, nats, and its gradient.

        Args:
            parameters: Shape (size,).
            images: Shape (rows, num_inputs).
            labels: Shape (rows,).
            mask: Of `draw_mask`.
        """
        w1, b1, w2, b2 = self._layers(parameters)
        rows = np.arange(len(labels))
        active = np.maximum(images @ w1 + b1, 0)
        kept = active * mask
        scores = kept @ w2 + b2
        scores -= scores.max(axis=1, keepdims=True)
        total = np.exp(scores).sum(axis=1, keepdims=True)
        log_probs = scores - np.log(total)

        # d loss / d scores = (softmax - one-hot) / rows; from there the chain rule, layer by layer.
        slope = np.exp(log_probs)
        slope[rows, labels] -= 1
        slope /= len(labels)
        hidden_slope = (slope @ w2.T) * mask * (active > 0)
        gradient = np.concatenate(
            [
                (images.T @ hidden_slope).ravel(),
                hidden_slope.sum(axis=0),
                (kept.T @ slope).ravel(),
                slope.sum(axis=0),
            ]
        )
        return -float(log_probs[rows, labels].mean()), gradient

    def _layers(self, parameters: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """Return views of the weights and biases."""
        shapes = (
            (self.num_inputs, self.num_hidden),
            (self.num_hidden,),
            (self.num_hidden, self.num_classes),
            (self.num_classes,),
        )
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        w1, b1, w2, b2 = (
            part.reshape(shape)
            for part, shape in zip(np.split(parameters, ends[:-1]), shapes, strict=True)
        )
        return w1, b1, w2, b2
