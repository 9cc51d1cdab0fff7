"""A step's end that changes no weight: the optimizer updates copies of the shards, and what moves is timed apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import Tensor

from lengthwise.engine.parameters import Parameters, Shard
from lengthwise.profiler.watch import Stopwatch


class RehearsedParameters:
    """`Parameters` around others; an optimizer over these leaves the others as they are, to the bit.

    `moved_seconds`: in which gradients were reduced and parameters published since it was set to 0.
    """

    def __init__(self, parameters: Parameters, watch: Stopwatch) -> None:
        self._parameters, self._watch = parameters, watch
        self.moved_seconds = 0.0

    def shards(self) -> Sequence[Shard]:
        """Return copies of the shards."""
        kept = self._parameters.shards()
        return [replace(each, weights=each.weights.clone(), gradient=each.gradient.clone()) for each in kept]

    def reducing_early(self) -> AbstractContextManager[None]:
        """Sum gradients while they are made, where that is on."""
        return self._parameters.reducing_early()

    def begin_reducing(self) -> None:
        """Begin the sum of what is left of the gradients, where early sums are on."""
        self._parameters.begin_reducing()

    def reduce_gradients(self) -> Tensor:
        """Sum the gradients of all ranks, timed. Collective."""
        start = self._watch.now()
        reduced = self._parameters.reduce_gradients()
        self.moved_seconds += self._watch.now() - start
        return reduced

    def gather_gradients(self) -> dict[str, Tensor]:
        """Return the reduced gradient of every parameter, by name. Collective."""
        return self._parameters.gather_gradients()

    def clear_gradients(self) -> None:
        """Set the gradients of this rank to zero."""
        self._parameters.clear_gradients()

    def publish(self) -> None:
        """Publish the parameters as they are until they are there, and clear gradients, timed. Collective."""

        def publish() -> None:
            self._parameters.publish()
            self._parameters.published()

        self.moved_seconds += self._watch.seconds(publish)

    def published(self) -> None:
        """Do nothing: all that was published is there."""

    def publish_bytes(self) -> int:
        """Count the bytes that `publish` needs beside what is kept."""
        return self._parameters.publish_bytes()

    def tensors(self) -> Sequence[Tensor]:
        """Return all tensors that are kept from step to step; the copies are not."""
        return self._parameters.tensors()

    def state(self) -> Mapping[str, Tensor]:
        """Return what this rank alone holds of the parameters."""
        return self._parameters.state()
