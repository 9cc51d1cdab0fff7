"""The start of a session in a user's own loop: its model, its optimizer, and the ranks that the launcher started."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from lengthwise.comm import join, session_world
from lengthwise.engine.parameters import Parameters
from lengthwise.models import check_adapters, text_part, whole_model
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.session.hooks import point_at_slices
from lengthwise.session.misuse import check_kinds
from lengthwise.session.model import hugging_face_model
from lengthwise.session.settings import check_settings, cost_of
from lengthwise.session.sharded import ShardedInPlace
from lengthwise.session.start import Start


def start_of_loop(
    model: nn.Module,
    optimizer: Any,
    given: Mapping[str, Any],
    *,
    seed: int,
    timeout_seconds: float,
    closing: ExitStack,
) -> tuple[Start, ShardedInPlace | None]:
    """Return what a session of a loop begins with, and its optimizer on slices; None: nothing trains. Collective.

    given: the keywords of the session, not checked yet. closing: what ends with the session.

    Raises:
        ConfigError, ModelRefused, Problems: what cannot be kept, all in one message.
    """
    check_kinds(model=model, seed=seed, timeout_seconds=timeout_seconds)
    check_adapters(model)
    text = text_part(hugging_face_model(model))
    settings = check_settings(text, optimizer, given, seed=seed, timeout_seconds=timeout_seconds)
    cost, world = cost_of(settings), session_world(settings.device)
    transport = join(world, timeout_seconds=timeout_seconds)
    closing.callback(transport.close)
    sharded = None
    if settings.optimizer is not None:  # reads what there was
        sharded = ShardedInPlace(settings.optimizer, text, offloads=settings.trained.offloads)
    start = Start(
        model=model,
        text=text,
        settings=settings,
        cost=cost,
        transport=transport,
        local_ranks=world.local_size,
        process=None if transport.rank else closing.enter_context(PlannerProcess()),
        updates=None if sharded is None else partial(_pointed, sharded, (model, whole_model(text)), closing),
        stage_cost=cost if settings.asked.measurements else None,
        say=_say,
    )
    return start, sharded


def _pointed(
    sharded: ShardedInPlace, models: tuple[nn.Module, nn.Module], closing: ExitStack, parameters: Parameters, rank: int
) -> ShardedInPlace:
    point_at_slices(sharded, parameters, rank, models, closing)
    return sharded


def _say(choice: str) -> None:
    print(f"lengthwise: {choice}", flush=True)
