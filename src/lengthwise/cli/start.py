"""What `train` and `verify` have in common: from a run file to a checked job and its ranks."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lengthwise.comm import World, world_from_environment
from lengthwise.config import RunConfig, load_config
from lengthwise.core.errors import ConfigError
from lengthwise.train.job import Job, prepare_job
from lengthwise.train.launch import launch

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A checked job, and torchrun's world where there is one."""

    job: Job
    world: World | None

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for the run: it is alone, or rank 0 of torchrun."""
        return self.world is None or self.world.rank == 0


def prepare(path: Path, overrides: Sequence[Sequence[str]], *, ranks: int | None, timeout_seconds: float) -> Start:
    """Read the run file, find the ranks, check the job.

    Raises:
        LengthwiseError: with every problem that was found.
    """
    return prepare_config(load_config(path, [each for group in overrides for each in group]), ranks, timeout_seconds)


def prepare_config(config: RunConfig, ranks: int | None, timeout_seconds: float) -> Start:
    """Like `prepare`, from settings that were read already."""
    _quiet_libraries()
    world = world_from_environment()
    if world is not None and ranks is not None and ranks != world.world_size:
        raise ConfigError(
            "--ranks",
            expected=f"nothing, or torchrun's {world.world_size}",
            got=str(ranks),
            remedy="Leave --ranks out under torchrun.",
        )
    if ranks is not None and ranks < 1:
        raise ConfigError("--ranks", expected="at least 1", got=str(ranks), remedy="Give the number of processes.")
    if not 0 < timeout_seconds < float("inf"):
        got = str(timeout_seconds)
        raise ConfigError("--timeout-seconds", expected="a positive number", got=got, remedy="Give seconds.")
    number = world.world_size if world is not None else ranks or _default_ranks()
    return Start(job=prepare_job(config, ranks=number, timeout_seconds=timeout_seconds), world=world)


def run_ranks(
    start: Start, work: Callable[[World, Callable[[str], None]], Result], *, asks_to_stop: bool = False
) -> Result:
    """Run `work` as torchrun's rank, or on local processes; return this rank's result, or rank 0's.

    `asks_to_stop`: see `launch`.
    """
    sys.stdout.flush()
    if start.world is not None:
        return work(start.world, lambda _phase: None)
    return launch(work, start.job.ranks, asks_to_stop=asks_to_stop)


def _default_ranks() -> int:
    import torch

    gpus = torch.cuda.device_count()
    if gpus:
        print(f"note: {gpus} GPUs found; this version computes on the CPU (CUDA comes next)", file=sys.stderr)
    return max(1, gpus)


def _quiet_libraries() -> None:
    """Keep other libraries' progress bars and advice out of our output; their errors still come through."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", module="transformers")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
