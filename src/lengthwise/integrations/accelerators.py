"""An accelerator that leaves gradients and data to the plan, and stand-ins for it where a rank has all numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import gather_object

from lengthwise.core.errors import ConfigError

_PARALLEL = ("NO", "MULTI_CPU", "MULTI_GPU")  # accelerate's names of plain data parallelism


def leave_data_and_gradients(accelerator: Any) -> None:
    """Let an accelerator of plain data parallelism wrap models in autocast only, and give every rank all data."""
    kind, precision = accelerator.distributed_type.name, accelerator.mixed_precision
    if kind not in _PARALLEL or precision not in ("no", "bf16"):
        remedy = "Start with torchrun, or with an accelerate config of plain data parallelism."
        got = f"{kind} in {precision}"
        raise ConfigError("accelerate", expected=f"{', '.join(_PARALLEL)}, in no or bf16", got=got, remedy=remedy)
    prepare, config = accelerator.prepare_model, accelerator.dataloader_config
    # evaluation_mode: without DDP, whose hooks are collectives in backward.
    accelerator.prepare_model = lambda model, **how: prepare(
        model, **{**how, "evaluation_mode": True, "device_placement": False}
    )
    accelerator.prepare_data_loader = lambda loader, **_: prepare_data_loader(
        loader,
        num_processes=1,
        process_index=0,
        rng_types=accelerator.rng_types.copy(),
        use_seedable_sampler=config.use_seedable_sampler,
        data_seed=config.data_seed,
    )


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give an object other attributes inside the block."""
    kept = {name: each for name, each in vars(owner).items() if name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(kept)


@contextmanager
def ungathered(accelerator: Any, *, is_logged: bool = True) -> Iterator[None]:
    """Make the accelerator's collectives return their argument: this rank's, or the same on all ranks.

    is_logged: False to return zeros on the host instead, of metrics that nobody reads, so that `.item()` does not wait.
    """

    def own(value: Any, *_: Any, **__: Any) -> Any:
        return value if is_logged else torch.zeros(value.shape, dtype=value.dtype)

    with replaced(accelerator, gather=own, gather_for_metrics=own, reduce=own, pad_across_processes=own):
        yield


class AloneOnRank:
    """Stands for an accelerator on a rank that keeps the numbers of all ranks itself."""

    is_main_process = True

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather_for_metrics(self, values: Any) -> Any:
        """Return the values, which are those of all ranks."""
        return values


@contextmanager
def cached_together(dataset: Any) -> Iterator[None]:
    """Inside the block, remove a cache file of the dataset that not all ranks see when they ask for its path.

    Else the ranks that see it would leave the others alone in the work that it saves.
    """
    if not hasattr(dataset, "num_rows"):
        yield
        return
    path_of = dataset._get_cache_file_path

    def agreed(fingerprint: str) -> str:
        path = Path(path_of(fingerprint))
        if not all(gather_object([path.exists()])):
            path.unlink(missing_ok=True)
        return str(path)

    with replaced(dataset, _get_cache_file_path=agreed):
        yield
