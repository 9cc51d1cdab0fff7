"""Whole steps of one rank, ours and plain Hugging Face's: tokens a second, MFU, memory beside the state.

Loops are built one after the other and again in the opposite order, so that a drift of the clocks meets all alike.
Nobody has fused kernels of Liger.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from gpu.batches import BatchKind, plan_for
from gpu.clock import seconds_of
from gpu.loops import OurLoop, PlainLoop
from gpu.models import hardware_here, model_config, peak_flops_per_second, step_flops
from gpu.place import clocks
from gpu.records import Records
from gpu.sizes import Sizes
from lengthwise.core.errors import MemoryShortage
from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import shape_from_config
from lengthwise.cost.measured import base_cost
from lengthwise.engine.batch import random_batch
from lengthwise.engine.memory import PeakMemory
from lengthwise.models import Computing

OURS, COMPILED = "lengthwise", "lengthwise, compiled"
RIVALS: Mapping[str, Mapping[str, bool]] = {
    "HF one by one": {"packed": False},
    "HF + varlen": {"packed": True},
}


def steps(sizes: Sizes, records: Records) -> None:
    """Write rows `step` of lengthwise and of plain Hugging Face."""
    ours = [OURS, COMPILED] if sizes.step_compiled else [OURS]
    names = [*ours, *RIVALS]
    for model, batches in sizes.step_models.items():
        took: dict[tuple[str, str], list[float]] = {}
        for turn, loop in enumerate([*names, *reversed(names)]):
            for kind, row in _rows_of(sizes, model, loop, batches):
                took.setdefault((loop, kind.name), []).extend(row.pop("all_seconds", []))
                records.add("step, each turn", turn=turn, model=model, loop=loop, batch=kind.name, **row)
            _let_go(sizes)
        for kind in batches:
            _summary(sizes, records, model, kind, {loop: took.get((loop, kind.name), []) for loop in names})


def _let_go(sizes: Sizes) -> None:
    """Give back what a loop held, which nobody has any more."""
    gc.collect()
    if sizes.device == "cuda":
        torch.cuda.empty_cache()


def _summary(sizes: Sizes, records: Records, model: str, kind: BatchKind, took: Mapping[str, Sequence[float]]) -> None:
    """Write the medians of a batch over all turns."""
    config, lengths = model_config(model), kind.lengths()
    first = next(iter(took.values()))  # ours
    ours = statistics.median(first) if first else None
    flops = step_flops(config, shape_from_config(config.to_dict()).total_params, lengths)
    peak = peak_flops_per_second(sizes.where)
    for loop, seconds in took.items():
        if not seconds:
            continue
        median = statistics.median(seconds)
        records.add(
            "step",
            model=model,
            batch=kind.name,
            longest_tokens=max(lengths),
            recompute=kind.recompute,
            loop=loop,
            seconds=median,
            spread=(max(seconds) - min(seconds)) / median,
            tokens_per_second=sum(lengths) / median,
            mfu=flops / median / peak,
            times_lengthwise=None if ours is None else median / ours,
        )


def _rows_of(
    sizes: Sizes, model: str, loop_name: str, batches: Sequence[BatchKind]
) -> Iterator[tuple[BatchKind, dict[str, Any]]]:
    """Build a loop and run every batch; yield seconds, bytes and the loss of the first step, or why there are none."""
    loop = _build(sizes, model, loop_name)
    for kind in batches:
        try:
            row = _run_batch(sizes, loop, kind)
        except torch.OutOfMemoryError as error:
            row = {"refused": str(error).splitlines()[0][:200]}
        except MemoryShortage as error:
            row = {"refused": error.got[:200]}
        loop.parameters.clear_gradients()
        yield kind, row
        _let_go(sizes)


def _run_batch(sizes: Sizes, loop: OurLoop | PlainLoop, kind: BatchKind) -> dict[str, Any]:
    device, lengths, memory = sizes.where, kind.lengths(), PeakMemory()
    config: Any = loop.model.config
    batch, plan = random_batch(lengths, vocab=config.vocab_size), _plan(sizes, config, kind)
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
        "said": "; ".join(loop.said),
    }


def _build(sizes: Sizes, model: str, name: str) -> OurLoop | PlainLoop:
    device = sizes.where
    if name in (OURS, COMPILED):
        computing = Computing(compile=name == COMPILED, fused_layers="off")
        return OurLoop(model, device, sizes.dtype, computing=computing)
    return PlainLoop(model, device, sizes.dtype, pack_tokens=sizes.pack_tokens, **RIVALS[name])


def _plan(sizes: Sizes, config: Any, kind: BatchKind) -> Plan:
    """Plan a batch for one rank that holds its longest document, or a pack."""
    cost = base_cost(shape_from_config(config.to_dict()), hardware_here(sizes.where), precision=sizes.precision)
    lengths = kind.lengths()
    cluster = Cluster(ranks=1, capacity_tokens=max(sizes.pack_tokens, *lengths))
    return plan_for(lengths, cost, cluster, layers=config.num_hidden_layers, recompute=kind.recompute)
