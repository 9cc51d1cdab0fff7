"""Checkpoints of a Trainer: its files, the optimizer's state in the form of a plain one, at any number of ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lengthwise.core.errors import ConfigError
from lengthwise.session import Session

OPTIMIZER, SCHEDULER, MASTERS = "optimizer.pt", "scheduler.pt", "master_weights.safetensors"


def save_state(trainer: Any, session: Session, folder: str) -> None:
    """Write the states of optimizer and scheduler; rank 0 writes. Collective."""
    state = session.state_dict()
    if not trainer.args.should_save:
        return
    os.makedirs(folder, exist_ok=True)
    torch.save(state["optimizer"], os.path.join(folder, OPTIMIZER))
    if any(parameter.dtype == torch.bfloat16 for parameter in trainer.model.parameters() if parameter.requires_grad):
        save_file(state["master_weights"], os.path.join(folder, MASTERS))
    assert trainer.lr_scheduler is not None, "train() has made it"
    torch.save(trainer.lr_scheduler.state_dict(), os.path.join(folder, SCHEDULER))


def load_state(trainer: Any, session: Session, folder: str) -> None:
    """Read what `save_state` wrote, or a plain Trainer. Collective.

    Raises:
        ConfigError: a file is not there.
    """
    lacking = [name for name in (OPTIMIZER, SCHEDULER) if not os.path.isfile(os.path.join(folder, name))]
    if lacking:
        remedy = "Take a checkpoint that save_only_model did not cut short, or load its model and start a new training."
        got = f"no {' and no '.join(lacking)}"
        raise ConfigError(folder, expected="a checkpoint of this trainer", got=got, remedy=remedy)
    state: dict[str, Any] | None = None
    if trainer.args.process_index == 0:
        optimizer = torch.load(os.path.join(folder, OPTIMIZER), map_location="cpu", weights_only=True)
        masters = os.path.join(folder, MASTERS)
        state = {"steps": trainer.state.global_step, "optimizer": optimizer}
        if os.path.isfile(masters):
            state["master_weights"] = load_file(masters)
    session.load_state_dict(state)
    assert trainer.lr_scheduler is not None, "it was made"
    trainer.lr_scheduler.load_state_dict(torch.load(os.path.join(folder, SCHEDULER), weights_only=True))
