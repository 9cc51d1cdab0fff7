"""What a step's seconds on the device go to: kernels by kind, from torch's profiler, and what no kernel fills.

Kinds are read off the kernels' names; the longest of them are listed, so that a wrong reading shows.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu.batches import plan_for
from gpu.clock import seconds_of
from gpu.costs_here import hardware_here
from gpu.loops import OurLoop
from gpu.records import Records
from gpu.sizes import Sizes
from lengthwise.core.shape import Cluster
from lengthwise.cost import shape_from_config
from lengthwise.cost.measured import base_cost
from lengthwise.engine.batch import random_batch

KINDS = (
    ("attention", r"flash|fmha|attention|cudnn.*sdpa|mha"),
    ("matrix products", r"gemm|cutlass|matmul|aten::mm|aten::addmm|aten::bmm|nvjet|sgemm|cublas|linear"),
    ("optimizer", r"adam|multi_tensor|foreach|lerp|addcdiv|addcmul"),
    ("softmax and loss", r"softmax|nll|cross_entropy"),
    ("copies", r"memcpy|copy|memset|fill|zero_"),
    ("elementwise and norms", r"elementwise|reduce|norm|mul|add|silu|mean|rsqrt|pow|neg|cat|index|embedding|triton"),
)
_LONGEST = 12


def shares(sizes: Sizes, records: Records) -> None:
    """Write rows `share` of one step, and `kernel` for the longest kernels."""
    device = sizes.where
    loop = OurLoop(sizes.share_model, device, sizes.dtype)
    config: Any = loop.model.config
    lengths = sizes.share_batch.lengths()
    cost = base_cost(shape_from_config(config.to_dict()), hardware_here(device), precision=sizes.precision)
    cluster = Cluster(ranks=1, capacity_tokens=max(sizes.pack_tokens, *lengths))
    plan = plan_for(lengths, cost, cluster, layers=config.num_hidden_layers)
    batch = random_batch(lengths, vocab=config.vocab_size)
    step = seconds_of(lambda: loop.step(plan, batch), device, repeats=2)
    activities = [ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        loop.step(plan, batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    kernels = {each.key: _seconds(each, device) for each in profiler.key_averages()}
    by_kind: dict[str, float] = {}
    for name, seconds in kernels.items():
        by_kind[kind_of(name)] = by_kind.get(kind_of(name), 0.0) + seconds
    whole = max(min(step), sum(kernels.values()))
    by_kind["nothing on the device"] = whole - sum(kernels.values())
    for kind, seconds in sorted(by_kind.items(), key=lambda each: -each[1]):
        records.add("share", kind=kind, seconds=seconds, share=seconds / whole)
    for name in sorted(kernels, key=lambda each: -kernels[each])[:_LONGEST]:
        records.add("kernel", name=name[:120], kind=kind_of(name), seconds=kernels[name], share=kernels[name] / whole)


def kind_of(name: str) -> str:
    """Return the kind of a kernel by its name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name.lower())), "others")


def _seconds(event: Any, device: torch.device) -> float:
    """Return the seconds of a kernel's own, on the device."""
    spent = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
    return spent / 1e6
