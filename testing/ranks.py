"""Real processes: the same launcher and transport as a training run, and the results of all ranks brought back."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lengthwise.comm import SoloTransport, TorchTransport, World
from lengthwise.run.launch import launch

Result = TypeVar("Result")


def run_ranks(
    work: Callable[[TorchTransport | SoloTransport], Result],
    ranks: int,
    *,
    timeout_seconds: float = 120.0,
    before_joining: Callable[[int], None] | None = None,
) -> list[Result]:
    """Call `work` in one forked process a rank, joined over gloo; return what each returned, by rank.

    `before_joining` is called in each of them with its rank, before it opens a socket.

    Raises:
        LengthwiseError: what `lengthwise.run.launch.launch` raises for a rank that failed.
    """
    with tempfile.TemporaryDirectory(prefix="lengthwise-test-") as folder:

        def rank_work(world: World, on_phase: Callable[[str], None]) -> None:
            if before_joining is not None:
                before_joining(world.rank)
            transport = (
                SoloTransport()
                if world.world_size == 1
                else TorchTransport(world, timeout_seconds=timeout_seconds, on_phase=on_phase)
            )
            result = work(transport)
            transport.close()
            (Path(folder) / str(world.rank)).write_bytes(pickle.dumps(result))

        launch(rank_work, ranks)
        # Written a moment ago by our own children.
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]
