"""The joined ranks of a session, as one of them sees them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from lengthwise.comm import Transport, join, session_world
from lengthwise.planner.service.process import PlannerProcess


def _say(choice: str) -> None:
    print(f"lengthwise: {choice}", flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRanks:
    """The joined ranks of a session.

    local_ranks: number of ranks on this machine. planner: the planner's process on rank 0; None on other ranks, and if
    the session runs given plans only. say: reports a choice; rank 0 alone calls it. is_run: whether the loop is that of
    a run file, which does the same on all ranks and takes the session's own loss alone: then ranks do not compare what
    they did, and other losses are not measured.
    """

    transport: Transport
    local_ranks: int
    planner: PlannerProcess | None = None
    say: Callable[[str], None] = _say
    is_run: bool = False


def join_ranks(device: torch.device, timeout_seconds: float, closing: ExitStack) -> SessionRanks:
    """Join the ranks that a launcher started for a user's loop. Collective. closing: leaves them when it closes.

    Raises:
        ConfigError: the launcher's variables are incomplete.
    """
    world = session_world(device)
    transport = join(world, timeout_seconds=timeout_seconds)
    closing.callback(transport.close)
    planner = None if transport.rank else closing.enter_context(PlannerProcess())
    return SessionRanks(transport=transport, local_ranks=world.local_size, planner=planner)
