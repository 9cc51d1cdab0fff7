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
    the session runs given plans only. say: function that reports a choice, called on rank 0 only. is_run: True for the
    loop of a run file, which does the same on all ranks and has only the session's own loss: then ranks do not compare
    their calls, and other losses are not measured.
    """

    transport: Transport
    local_ranks: int
    planner: PlannerProcess | None = None
    say: Callable[[str], None] = _say
    is_run: bool = False


def join_ranks(device: torch.device, timeout_seconds: float, closing: ExitStack) -> SessionRanks:
    """Join the ranks that a launcher started for a user's loop. Collective. closing: stack that leaves them at its end.

    Raises:
        ConfigError: the launcher's variables are incomplete.
    """
    world = session_world(device)
    transport = join(world, timeout_seconds=timeout_seconds)
    closing.callback(transport.close)
    planner = None if transport.rank else closing.enter_context(PlannerProcess())
    return SessionRanks(transport=transport, local_ranks=world.local_size, planner=planner)
