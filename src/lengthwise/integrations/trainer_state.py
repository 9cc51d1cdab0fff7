"""Checkpoints of a Trainer: its files, with the session's state as a folder of slices in place of `optimizer.pt`.

All ranks write `checkpoint-50/lengthwise/`; any number of ranks reads it. Checkpoints of a plain Trainer are read too.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from lengthwise.core.errors import ConfigError
from lengthwise.session import Session

STATE, OPTIMIZER, SCHEDULER = "lengthwise", "optimizer.pt", "scheduler.pt"  # the second is a plain Trainer's
MASTERS = "master_weights.safetensors"  # of an earlier version, which had no STATE


def save_state(trainer: Any, session: Session, folder: str) -> None:
    """Write the states of session and scheduler. Collective."""
    session.save(os.path.join(folder, STATE))
    if trainer.args.should_save:
        assert trainer.lr_scheduler is not None, "train() has made it"
        torch.save(trainer.lr_scheduler.state_dict(), os.path.join(folder, SCHEDULER))


def load_state(trainer: Any, session: Session, folder: str) -> None:
    """Read a checkpoint that `save_state` or a plain Trainer wrote. Collective.

    Raises:
        ConfigError: a file is missing, or an earlier version wrote them.
        OutputError, Problems: a file cannot be read, on all ranks; see `Session.load`.
    """
    paths = [os.path.join(folder, name) for name in (STATE, OPTIMIZER, SCHEDULER, MASTERS)]
    state, plain, scheduler, _ = paths
    seen = session.sum_over_ranks(torch.tensor([float(os.path.exists(each)) for each in paths])) > 0
    has_state, has_plain, has_scheduler, has_masters = seen.tolist()
    wrong = [] if has_state or has_plain else [f"no {STATE} and no {OPTIMIZER}"]
    wrong += [] if has_scheduler else [f"no {SCHEDULER}"]
    wrong += [f"{MASTERS}, of an earlier version"] if has_masters and not has_state else []
    if wrong:
        remedy = "Take a checkpoint saved without save_only_model, or load its model and start a new training."
        raise ConfigError(folder, expected="a checkpoint of this trainer", got=" and ".join(wrong), remedy=remedy)
    session.load(state if has_state else plain)  # names a rank that does not see it
    if not has_state:
        session.runner.steps = trainer.state.global_step
    assert trainer.lr_scheduler is not None, "it was made"
    trainer.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))
