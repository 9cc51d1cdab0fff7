"""The start of a session in a user's own loop: its model, its optimizer, and the ranks that the launcher started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from lengthwise.comm import join, session_world
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.whole_optimizer import read_optimizer
from lengthwise.models import check_adapters, text_part, whole_model
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.session.hooks import guard_models
from lengthwise.session.loop_optimizer import LoopOptimizer
from lengthwise.session.misuse import check_kinds
from lengthwise.session.model import hugging_face_model
from lengthwise.session.settings import SessionSettings, check_settings, cost_of
from lengthwise.session.start import Start
from lengthwise.session.withheld import refuse_hooks


def start_of_loop(
    model: nn.Module,
    optimizer: Any,
    given: Mapping[str, Any],
    *,
    seed: int,
    timeout_seconds: float,
    closing: ExitStack,
) -> Start[LoopOptimizer]:
    """Return what a session of a loop begins with. Collective.

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
    return Start(
        model=model,
        text=text,
        settings=settings,
        cost=cost,
        transport=transport,
        local_ranks=world.local_size,
        process=None if transport.rank else closing.enter_context(PlannerProcess()),
        optimizer=None if settings.optimizer is None else _on_slices(settings, model, text, closing),
        stage_cost=cost if settings.asked.measurements else None,
        say=_say,
    )


def _on_slices(
    settings: SessionSettings, model: nn.Module, text: nn.Module, closing: ExitStack
) -> Callable[[Parameters, int], LoopOptimizer]:
    """Return what points the loop's optimizer, as it is now, at slices of the model's parameters."""
    assert settings.optimizer is not None, "it trains"
    whole = read_optimizer(settings.optimizer, text)
    refuse_hooks(whole.given)

    def point(parameters: Parameters, rank: int) -> LoopOptimizer:
        optimizer = LoopOptimizer(whole, parameters, rank, text, offloads=settings.trained.offloads)
        guard_models(optimizer, (model, whole_model(text)), closing)
        return optimizer

    return point


def _say(choice: str) -> None:
    print(f"lengthwise: {choice}", flush=True)
