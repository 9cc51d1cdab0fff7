"""Costs of this device, from a short profile of a model that is there already, on links that a description names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gpu.loops import OurLoop
from gpu.models import model_source
from gpu.place import device_name
from lengthwise.comm import World
from lengthwise.config import OptimizerConfig
from lengthwise.core.measurements import Measurements, Precision
from lengthwise.cost import Cost, hardware_of_gpu, shape_from_config
from lengthwise.cost.fit import with_terms
from lengthwise.cost.measured import base_cost
from lengthwise.engine.optimizer import ShardedOptimizer
from lengthwise.profiler.profile import ProfileSettings, profile


def hardware_here(device: torch.device) -> str:
    """Return the named hardware of a device."""
    return hardware_of_gpu(device_name(device))[0] if device.type == "cuda" else "cpu"


def profile_loop(
    name: str, loop: OurLoop, *, seconds: float, longest_tokens: int, precision: Precision
) -> Measurements:
    """Profile the model of a loop on one rank, which changes no weight."""
    world = World(rank=0, world_size=1, gpus=int(loop.device.type == "cuda"))
    settings = ProfileSettings(
        seconds=seconds,
        longest_tokens=longest_tokens,
        precision=precision,
        clock="wall",
        hardware=hardware_here(loop.device),
        computing=loop.computing,
    )
    optimizer = ShardedOptimizer(loop.parameters, OptimizerConfig(), loop.transport)
    return profile(
        model_source(name), world, loop.transport, settings, trained=(loop.model, loop.parameters, optimizer)
    )


def cost_of(found: Measurements, config: Any) -> Cost:
    """Return costs with the measured terms, of nodes and links as the named hardware has them."""
    base = base_cost(shape_from_config(config.to_dict()), found.hardware, precision=found.precision)
    curve = found.fit.block_efficiency or base.block_efficiency
    named = replace(base, block_efficiency=curve, version=f"measured/1 {found.model.name} {found.digest()[:12]}")
    return with_terms(named, found.fit.terms)
