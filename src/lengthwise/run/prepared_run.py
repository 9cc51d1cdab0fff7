"""The common beginning of `train` and `verify`: from a run file or its values to joined ranks with a checked job."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from lengthwise.comm import (
    Transport,
    World,
    agree,
    built_for_gpus,
    count_gpus,
    find_gpus,
    has_unused_gpu,
    join,
    raise_together,
    world_from_environment,
)
from lengthwise.config import RunConfig, build_config, dump_config, load_config
from lengthwise.core.errors import Collector, ConfigError
from lengthwise.core.sizes import MOST_RANKS, read_whole
from lengthwise.data.prepared import is_prepared
from lengthwise.profiler.place import first_gpu_name
from lengthwise.run.checks import settle
from lengthwise.run.job import Job, RunStart

_LONGEST_SECONDS = 10**6  # eleven days; gloo counts milliseconds in 31 bits

Result = TypeVar("Result")
Run = RunConfig | str | Path | Mapping[str, object]
"""A run: checked settings, the path of a run file, or its values (relative paths start from the working folder)."""


def read_start(
    run: Run,
    overrides: Sequence[str],
    *,
    ranks: int | None,
    timeout_seconds: float,
    check: Callable[[RunConfig], None] = lambda _config: None,
) -> RunStart:
    """Read the run file and find the number of ranks; model and data are not read yet.

    check: the verb's own check of its arguments, or of the settings.
    """
    quiet_libraries()
    collector = Collector()
    world = collector.attempt(lambda: _torchrun(ranks))
    collector.attempt(lambda: ranks is None or read_whole("ranks", ranks, most=MOST_RANKS))
    collector.attempt(lambda: _check_timeout(timeout_seconds))
    config = collector.attempt(lambda: _settings(run, overrides))
    gpus = None if config is None else collector.attempt(partial(count_used_gpus, config.device))
    if config is not None:
        collector.attempt(partial(check, config))
    collector.raise_all()
    assert config is not None, "a run file that was not read must have been a problem"
    assert gpus is not None, "a missing device must have been a problem"
    config, chosen = settle(config, gpus=gpus)
    if any(each.comes_meanwhile is None and not (each.path and is_prepared(each.path)) for each in config.data):
        import_module("datasets")  # before ranks are forked: 0.9 s and 47 MB of each
    return RunStart(
        config=config,
        ranks=world.world_size if world else ranks or max(1, gpus),
        gpus=gpus,
        gpu_name=first_gpu_name() if gpus else None,
        timeout_seconds=timeout_seconds,
        chosen=chosen,
    )


def join_with(
    world: World,
    make: Callable[[], Result],
    *,
    timeout_seconds: float,
    on_phase: Callable[[str], None],
    say: Callable[[str], None] | None = None,
) -> tuple[Result, Transport]:
    """Return the result of `make` on this rank, and the transport of all ranks, which join after it. Collective.

    An error of `make` on any rank is raised on all.
    """
    problems = Collector()
    on_phase("reading model and data")
    made = problems.attempt(make)
    transport = join(world, timeout_seconds=timeout_seconds, on_phase=on_phase, say=say)
    raise_together(transport, problems.problems)
    assert made is not None, "what was not made must have been a problem"
    return made, transport


def agree_on_data(transport: Transport, job: Job) -> None:
    """Raise RankError unless all ranks read the same run file and data. Collective."""
    if transport.world_size > 1:
        data = hashlib.sha256(dump_config(job.config).encode())
        for dataset in filter(None, (job.dataset, job.eval_dataset)):
            data.update(dataset.digest())
        agree(transport, data.digest(), "run file and data")


def _settings(run: Run, overrides: Sequence[str]) -> RunConfig:
    if isinstance(overrides, str):
        got, remedy = repr(overrides), "Put the text into a list."
        raise ConfigError("overrides", expected="a list of texts key=value", got=got, remedy=remedy)
    if isinstance(run, str | Path):
        return load_config(Path(run), overrides)
    if overrides:
        expected, got = "none, because the settings are not a file", ", ".join(map(repr, overrides))
        raise ConfigError("overrides", expected=expected, got=got, remedy="Change the settings themselves.")
    if isinstance(run, RunConfig):
        return run
    if not isinstance(run, Mapping):
        expected, got = "the path of a run file, its values or a RunConfig", f"{run!r} ({type(run).__name__})"
        raise ConfigError("run", expected=expected, got=got, remedy="Give one of these.")
    return build_config(run, Path.cwd())


def _torchrun(ranks: int | None) -> World | None:
    world = world_from_environment()
    if world is not None and ranks is not None and ranks != world.world_size:
        expected, remedy = f"nothing, or torchrun's {world.world_size}", "Leave {ranks} out under torchrun."
        raise ConfigError("ranks", expected=expected, got=str(ranks), remedy=remedy)
    return world


def _check_timeout(timeout_seconds: float) -> None:
    if not (isinstance(timeout_seconds, int | float) and 0 < timeout_seconds <= _LONGEST_SECONDS):
        expected, got = f"a positive number, at most {_LONGEST_SECONDS:,}", str(timeout_seconds)
        raise ConfigError("timeout_seconds", expected=expected, got=got, remedy="Give seconds.")


def count_used_gpus(device: str) -> int:
    """Return the number of GPUs of this machine that a run with this `device` uses.

    Raises ConfigError if `cuda` finds no GPU, or `auto` finds one that torch, though built for GPUs, cannot use:
    training on the CPU would take many times as long.
    """
    gpus = 0 if device == "cpu" else count_gpus()
    if gpus or device == "cpu":
        return gpus
    got = f"none ({find_gpus().why_none})"
    if device == "cuda":
        remedy = "Set device: auto or cpu, or install a CUDA build of torch and a driver that is new enough for it."
        raise ConfigError("device", expected="a GPU, for device: cuda", got=got, remedy=remedy)
    if has_unused_gpu() and built_for_gpus():
        expected = "a GPU that torch can use, because this machine has one"
        remedy = "Repair the driver or the build of torch, or set device: cpu to train without it."
        raise ConfigError("device", expected=expected, got=got, remedy=remedy)
    return 0


def quiet_libraries() -> None:
    """Silence progress bars and advice of other libraries, but not their errors."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", module="transformers")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    for agent in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(agent).setLevel(logging.CRITICAL)  # `run.launch` raises what torch's agent logs
