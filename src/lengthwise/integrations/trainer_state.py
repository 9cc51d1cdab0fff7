"""Checkpoints of a Trainer: its files, with the session's state as a folder of slices in place of `optimizer.pt`.

All ranks write `checkpoint-50/lengthwise/`; any number of ranks reads it. Checkpoints of a plain Trainer, and of
earlier versions, which gathered the optimizer on rank 0, are read too.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors.torch import load_file

from lengthwise.comm import raise_together
from lengthwise.core.errors import ConfigError, LengthwiseError, OutputError
from lengthwise.session import Session

STATE, SCHEDULER = "lengthwise", "scheduler.pt"
OPTIMIZER, MASTERS = "optimizer.pt", "master_weights.safetensors"  # files of a plain Trainer, and of earlier versions


def save_state(trainer: Any, session: Session, folder: str) -> None:
    """Write the states of session and scheduler. Collective."""
    session.save(os.path.join(folder, STATE))
    if trainer.args.should_save:
        assert trainer.lr_scheduler is not None, "train() has made it"
        torch.save(trainer.lr_scheduler.state_dict(), os.path.join(folder, SCHEDULER))


def load_state(trainer: Any, session: Session, folder: str) -> None:
    """Read a checkpoint that `save_state` or a plain Trainer wrote. Collective.

    Raises:
        ConfigError: a file is missing.
        OutputError, Problems: a file cannot be read, on all ranks; see `Session.load`.
    """
    state = os.path.join(folder, STATE)
    seen = int(session.sum_over_ranks(torch.tensor([float(os.path.isdir(state))])))
    if not seen:
        _load_plain(trainer, session, folder)
    else:
        session.load(state)  # names a rank that does not see the folder
    scheduler = os.path.join(folder, SCHEDULER)
    if not os.path.isfile(scheduler):
        raise _lacking(folder, SCHEDULER)
    assert trainer.lr_scheduler is not None, "it was made"
    trainer.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))


def _load_plain(trainer: Any, session: Session, folder: str) -> None:
    """Read the optimizer of a plain Trainer, and exact weights beside it, on rank 0. Collective."""
    lacking = [name for name in (OPTIMIZER, SCHEDULER) if not os.path.isfile(os.path.join(folder, name))]
    if lacking:
        raise _lacking(folder, STATE, *lacking)
    state, problems = dict[str, Any](), list[LengthwiseError]()
    try:
        if trainer.args.process_index == 0:
            state = _read_plain(folder)
    except Exception as error:  # noqa: BLE001 - of a disk or a library; the other ranks wait
        got, remedy = f"{type(error).__name__}: {error}", "Take another checkpoint."
        problems.append(OutputError(folder, expected="the files that a Trainer wrote", got=got, remedy=remedy))
    raise_together(session.engine.transport, problems)
    session.load_state_dict({"steps": trainer.state.global_step, **state})


def _read_plain(folder: str) -> dict[str, Any]:
    state = {"optimizer": torch.load(os.path.join(folder, OPTIMIZER), map_location="cpu", weights_only=True)}
    if os.path.isfile(masters := os.path.join(folder, MASTERS)):
        state["master_weights"] = load_file(masters)
    return state


def _lacking(folder: str, *names: str) -> ConfigError:
    remedy = "Take a checkpoint saved without save_only_model, or load its model and start a new training."
    got = f"no {' and no '.join(names)}"
    return ConfigError(folder, expected="a checkpoint of this trainer", got=got, remedy=remedy)
