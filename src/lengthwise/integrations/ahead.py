"""Batches of somebody else's loader, planned while the step before them runs.

A loader may call collectives and draw random numbers, so it is asked on the thread that trains alone, for one update
more than is needed; the planner's thread waits for what comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from queue import SimpleQueue
from typing import Any

from lengthwise.core.errors import ConfigError
from lengthwise.integrations.rows import Examples
from lengthwise.session import Session
from lengthwise.session.rows import Row
from lengthwise.session.source import PlannedStep


class PlannedUpdates:
    """The updates of one pass over a loader; each of some batches, of which `rows_of` gives the rows of one plan."""

    def __init__(
        self, session: Session, batches: Iterator[Examples], *, rows_of: Callable[[list[Examples]], Sequence[Row]]
    ) -> None:
        self._batches, self._rows_of = batches, rows_of
        self._given: SimpleQueue[Sequence[Row] | None] = SimpleQueue()
        self._steps = session.batches(self)
        self._read: deque[list[Examples]] = deque()

    def __iter__(self) -> Iterator[Sequence[Row]]:
        """Iterate over what is to be planned."""
        return iter(self._given.get, None)

    def next(self, size: int) -> tuple[list[Examples], PlannedStep] | None:
        """Return the next `size` batches (fewer at the end) and the plan of all of them; None: none is left."""
        while len(self._read) < 2 and (read := list(islice(self._batches, size))):
            self._read.append(read)
            self._given.put(self._rows_of(read))
        if not self._read:
            return None
        return self._read.popleft(), next(self._steps)

    def close(self) -> None:
        """End the planning of what was read; the loader stays."""
        self._given.put(None)
        self._steps.close()


def checked(batches: Iterator[Any]) -> Iterator[Examples]:
    """Yield batches.

    Raises:
        ConfigError: a loader of the user's own, which gives each rank another part.
    """
    for batch in batches:
        if not isinstance(batch, Examples):
            remedy = "Override data_collator or the samplers in place of get_train_dataloader."
            got = f"a {type(batch).__name__}"
            raise ConfigError("get_train_dataloader", expected="a DataLoader that Trainer made", got=got, remedy=remedy)
        yield batch
