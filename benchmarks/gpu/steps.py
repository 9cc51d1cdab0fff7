"""Whole steps beside plain Hugging Face's: tokens a second, MFU, memory beside the state.

Loops are built one after the other and again in the opposite order, so that a drift of the clocks meets all alike; what
has Liger's layers or compiles comes last, once. A row `step` is written as soon as a loop has two repeats, and again
with more: the last one of a loop and a batch counts. An error of a loop is its row, and the next loop runs.
"""

from __future__ import annotations

import gc
import statistics
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpu.loops import OurLoop, PlainLoop
from gpu.rows import Records, clocks, middle, seconds_of
from gpu.setting import (
    BatchKind,
    Sizes,
    hardware_here,
    model_config,
    peak_flops_per_second,
    plan_for,
    step_flops,
)
from lengthwise.core.errors import MemoryShortage
from lengthwise.core.shape import Cluster
from lengthwise.cost import shape_from_config
from lengthwise.cost.measured import base_cost
from lengthwise.engine.batch import random_batch
from lengthwise.engine.shortage import PeakMemory
from lengthwise.models import Computing

OURS, ONE_BY_ONE, PACKED = "lengthwise", "HF one by one", "HF + varlen"
LIGER, COMPILED = "lengthwise, Liger", "lengthwise, compiled"
PACKED_LIGER = "HF + varlen, Liger"
EAGER = (OURS, ONE_BY_ONE, PACKED)
_ONCE = {"steps_8b": (OURS, PACKED, LIGER, PACKED_LIGER, COMPILED)}  # loops that a part runs in one turn
_COMPUTING = {
    OURS: Computing(fused_layers="off"),
    LIGER: Computing(),
    COMPILED: Computing(compile=True, fused_layers="off"),
}
_FUSED = "fused layers: "
_LEAST_REPEATS = 2
_LOSS_DIFFERENCE = 1e-3  # of a first step in bf16, of loops from the same weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A loop that is built and runs all batches of a model."""

    model: str
    loop: str


def turns_of(sizes: Sizes, part: str) -> list[Turn]:
    """List the turns of a part, in order."""
    models = sizes.step_parts[part]
    if part in _ONCE:
        return [Turn(model=model, loop=loop) for model in models for loop in _ONCE[part]]
    turns = [Turn(model=model, loop=loop) for model in models for loop in (*EAGER, *reversed(EAGER))]
    if part == "steps" and sizes.step_compiled:
        turns += [Turn(model=model, loop=loop) for model in models for loop in (LIGER, COMPILED)]
    return turns


def steps(sizes: Sizes, records: Records, part: str = "steps") -> None:
    """Write rows `step` of lengthwise and of plain Hugging Face.

    Raises:
        SystemExit: a loop raised, or its first loss is another one than ours; its row and the log say what.
    """
    took, wrong = dict[tuple[str, str, str], list[float]](), dict[str, None]()
    losses = dict[tuple[str, str], float]()
    for number, turn in enumerate(turns_of(sizes, part)):
        for kind, row in _rows_of(sizes, turn, sizes.step_parts[part][turn.model]):
            found = took.setdefault((turn.model, kind.name, turn.loop), [])
            found.extend(row.pop("all_seconds", []))
            records.add("step, each turn", turn=number, model=turn.model, loop=turn.loop, batch=kind.name, **row)
            if "first_loss" in row:
                first = losses.setdefault((turn.model, kind.name), row["first_loss"])  # ours, which runs first
                row["loss_difference"] = abs(row["first_loss"] / first - 1)
            if "raised" in row or not row.get("loss_difference", 0.0) <= _LOSS_DIFFERENCE:
                wrong[turn.loop] = None
            if len(found) >= _LEAST_REPEATS or "refused" in row or "raised" in row:
                ours = took.get((turn.model, kind.name, OURS), [])
                _summary(sizes, records, turn, kind, found, ours, row)
        _let_go(sizes)
    if wrong:
        raise SystemExit(f"{part}: {', '.join(wrong)} raised, or had another loss; the other loops were measured")


def _let_go(sizes: Sizes) -> None:
    """Give back what a loop held, which nobody has any more."""
    gc.collect()
    if sizes.device == "cuda":
        torch.cuda.empty_cache()


def _summary(
    sizes: Sizes,
    records: Records,
    turn: Turn,
    kind: BatchKind,
    took: Sequence[float],
    ours: Sequence[float],
    row: Mapping[str, Any],
) -> None:
    """Write the medians of a loop and a batch over all turns so far, or why there are none."""
    config, lengths = model_config(turn.model), kind.lengths()
    about: dict[str, Any] = {"model": turn.model, "batch": kind.name, "longest_tokens": max(lengths)}
    about |= {"recompute": kind.recompute, "loop": turn.loop}
    if len(took) < _LEAST_REPEATS:
        records.add("step", **about, refused=row.get("raised") or row["refused"])
        return
    flops = step_flops(config, shape_from_config(config.to_dict()).total_params, lengths)
    found = middle(took)
    fused = next((each.removeprefix(_FUSED) for each in row["said"] if each.startswith(_FUSED)), "off")
    records.add(
        "step", **about, fused_layers=fused.split()[0].rstrip(";"), **found, repeats=len(took),
        tokens_per_second=sum(lengths) / found["seconds"],
        mfu=flops / found["seconds"] / peak_flops_per_second(sizes.where),
        times_lengthwise=found["seconds"] / statistics.median(ours) if ours else None,
        loss_difference=row["loss_difference"],
    )  # fmt: skip


def _rows_of(sizes: Sizes, turn: Turn, batches: Sequence[BatchKind]) -> Iterator[tuple[BatchKind, dict[str, Any]]]:
    """Build a loop and run every batch; yield seconds, bytes and the loss of the first step, or why there are none."""
    loop = None
    for kind in batches:
        try:
            loop = loop or _build(sizes, turn)
            row = _run_batch(sizes, loop, kind)
        except torch.OutOfMemoryError as error:
            row = {"refused": _first_line(error)}
        except MemoryShortage as error:
            row = {"refused": error.got[:200]}
        except Exception as error:  # noqa: BLE001 - whatever a loop raises, the others are measured
            traceback.print_exc()
            row = {"raised": f"{type(error).__name__}: {_first_line(error)}"}
            loop = None  # which may be in any state
        if loop is not None:
            loop.parameters.clear_gradients()
        yield kind, row
        _let_go(sizes)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


def _build(sizes: Sizes, turn: Turn) -> OurLoop | PlainLoop:
    if turn.loop in _COMPUTING:
        return OurLoop(turn.model, sizes.where, sizes.dtype, computing=_COMPUTING[turn.loop])
    packed, fused = turn.loop in (PACKED, PACKED_LIGER), "auto" if turn.loop == PACKED_LIGER else "off"
    how = {"packed": packed, "pack_tokens": sizes.pack_tokens, "fused_layers": fused}
    return PlainLoop(turn.model, sizes.where, sizes.dtype, **how)


def _run_batch(sizes: Sizes, loop: OurLoop | PlainLoop, kind: BatchKind) -> dict[str, Any]:
    """Run a batch on one rank that holds its longest document, or a pack."""
    device, lengths, memory = sizes.where, kind.lengths(), PeakMemory()
    config: Any = loop.model.config
    cost = base_cost(shape_from_config(config.to_dict()), hardware_here(device), precision=sizes.precision)
    cluster = Cluster(ranks=1, capacity_tokens=max(sizes.pack_tokens, *lengths))
    plan = plan_for(lengths, cost, cluster, layers=config.num_hidden_layers, recompute=kind.recompute)
    batch = random_batch(lengths, vocab=config.vocab_size)
    on_gpu, first_loss = device.type == "cuda", loop.step(plan, batch)
    state = torch.cuda.memory_allocated(device) if on_gpu else 0
    memory.start()
    seconds = seconds_of(lambda: loop.step(plan, batch), device, repeats=sizes.step_repeats, warm_up=0)
    return {
        "all_seconds": seconds,
        "first_loss": first_loss,
        "state_bytes": state,
        "beside_state_bytes": memory.peak_bytes() - state,
        "num_alloc_retries": int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if on_gpu else 0,
        "clocks": clocks(),
        "said": loop.said,
    }
