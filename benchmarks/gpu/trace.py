"""Seconds by kernel of one step, as `torch.profiler` sees them: what attention, products and small operations take."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile

from gpu.loops import OurLoop
from gpu.rows import Records, finish
from gpu.setting import Sizes, hardware_here, plan_for
from lengthwise.core.shape import Cluster
from lengthwise.cost import shape_from_config
from lengthwise.cost.measured import base_cost
from lengthwise.engine.batch import random_batch

_MOST = 25  # kernels with a row of their own


def trace(sizes: Sizes, records: Records) -> None:
    """Write a row `kernel` for each kernel of the second of two steps, longest first, and one for all others."""
    name, kind = sizes.traced
    loop, device = OurLoop(name, sizes.where, sizes.dtype), sizes.where
    config: Any = loop.model.config
    lengths = kind.lengths()
    cost = base_cost(shape_from_config(config.to_dict()), hardware_here(device), precision=sizes.precision)
    cluster = Cluster(ranks=1, capacity_tokens=max(lengths))
    plan = plan_for(lengths, cost, cluster, layers=config.num_hidden_layers, recompute=kind.recompute)
    batch = random_batch(lengths, vocab=config.vocab_size)
    loop.step(plan, batch)
    finish(device)
    with profile(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]) as ran:
        loop.step(plan, batch)
        finish(device)
    clock = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    found = [(getattr(each, clock) / 1e6, each.count, each.key) for each in ran.key_averages()]
    found = sorted((each for each in found if each[0]), reverse=True)
    total = sum(seconds for seconds, *_ in found)
    rest = (sum(each[0] for each in found[_MOST:]), sum(each[1] for each in found[_MOST:]), "all others")
    for seconds, calls, kernel in (*found[:_MOST], rest):
        records.add("kernel", model=name, kernel=kernel[:120], calls=calls, seconds=seconds, share=seconds / total)
