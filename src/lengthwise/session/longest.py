"""Refuse data whose longest sequence no plan can hold, with the settings that would hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lengthwise.core.errors import DataError
from lengthwise.core.names import counted
from lengthwise.offload import LEAVING_BYTES
from lengthwise.planner import PACKED_DP
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.session.capacity import Measuring, least, measuring_of
from lengthwise.session.engine import Engine
from lengthwise.session.settings import SessionSettings
from lengthwise.setup import memory_of_settings


def check_longest(
    engine: Engine, settings: SessionSettings, planning: StepPlanning, longest: int, *, end_bytes: float
) -> None:
    """Refuse a sequence of `longest` tokens that no plan holds. Collective. end_bytes: bytes that a step end needs."""
    fits = longest <= planning.longest_tokens
    if least(engine.transport, [float(fits)])[0]:  # ranks may differ in lengths and costs
        return
    held, replicas, stages = planning.most_held_tokens, planning.ranks, settings.asked.stages
    cuts = settings.asked.planner != PACKED_DP
    sharing = replicas if cuts else 1
    tokens = -(-longest // sharing)
    shared = "" if settings.on_gpus else " with as much memory each, on further machines: ranks of one share its memory"
    ranks = f"{-(-longest // held) * stages} ranks{shared if planning.measured else ''}"
    last = ranks if cuts else "a planner that cuts sequences (lengthwise)"
    enough = -(-longest * max(planning.capacities.values()) // (sharing * held))  # more fits with offload
    remedies, how = [f"capacity_tokens: {enough} or auto"], "given"
    if planning.measured is not None:
        how, kinds = "measured", _kinds(settings)
        most = {"most_tokens": settings.batch_tokens, "end_bytes": end_bytes}
        measuring = measuring_of(engine, kinds=kinds, heads=settings.asked.heads, **most)
        savers = _savers(settings, measuring, tokens, planning.measured.plain)
        remedies = [*savers, *_smaller_loss(settings, measuring, tokens, planning.ranks * stages)]
    expected = "sequences that all ranks together hold" if cuts else f"sequences that one rank holds, for {PACKED_DP}"
    got = f"{longest} tokens; {counted(replicas, 'rank' if stages == 1 else 'replica')} of {held} each ({how})"
    remedy = f"Use {', or '.join([*remedies, last])}, or data of at most {held * sharing} tokens (too_long: skip)."
    raise DataError("data", expected=expected, got=got, remedy=remedy)


def _kinds(settings: SessionSettings) -> list[str]:
    return list(settings.trained.kinds) if settings.recompute == "auto" else [settings.recompute]


def _smaller_loss(settings: SessionSettings, measuring: Measuring, tokens: int, ranks: int) -> list[str]:
    """Name the loss in chunks if it lets a rank hold `tokens` tokens. Collective."""
    if settings.trained.chunked or settings.stored is None:
        return []
    trained, on_gpus = replace(settings.trained, chunked=True), settings.on_gpus
    chunked = memory_of_settings(settings.asked, trained, ranks=ranks, on_gpus=on_gpus).logits_at_once
    memory = replace(measuring, logits_at_once=chunked).memory()
    held = max(least(measuring.engine.transport, [memory.most_tokens(kind, tokens) for kind in memory.layouts]))
    return [f"loss: chunked (a rank then holds {tokens} tokens)"] if held >= tokens else []


def _savers(settings: SessionSettings, measuring: Measuring, tokens: int, plain: Mapping[str, int]) -> list[str]:
    """List the settings of recomputation and of offload that let a rank hold `tokens` tokens. Collective.

    plain: measured capacities. With several stages the fullest rank counts.
    """
    transport, can_offload = measuring.engine.transport, settings.text.config.num_hidden_layers > 2
    leaving = max(LEAVING_BYTES.values()) if can_offload else None  # whatever store it would be
    memory = replace(measuring, kinds=settings.trained.kinds, leaving_bytes=leaving).memory()
    others, remedies = [kind for kind in memory.layouts if kind not in plain], list[str]()
    held = least(transport, [memory.most_tokens(kind, tokens) for kind in others])
    enough = [kind for kind, most in zip(others, held, strict=True) if most >= tokens]
    if enough:
        remedies.append(f"recompute: auto (a rank holds {tokens} tokens with {enough[0]})")
    if can_offload:
        ways = [(ratio, kind) for kind in memory.layouts for ratio in (0.25, 0.5, 0.75, 1.0)]
        held = least(transport, [memory.most_held(kind, ratio, tokens) for ratio, kind in ways])
        fitting = [way for way, most in zip(ways, held, strict=True) if most >= tokens]
        if fitting:
            ratio, kind = min(fitting, key=lambda each: (each[1] not in plain, each[0]))
            remedies.append(f"offload: with ratio {ratio:g} and recompute: {kind}")
    return remedies
