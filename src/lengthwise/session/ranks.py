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
    the session runs given plans only. say: reports a choice; rank 0 alone calls it. compares: whether the ranks compare
    what their loops did before they run; a loop of ours does the same on all ranks.
    """

    transport: Transport
    local_ranks: int
    planner: PlannerProcess | None = None
    say: Callable[[str], None] = _say
    compares: bool = True


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
