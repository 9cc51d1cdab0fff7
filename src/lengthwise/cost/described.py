"""Measurements of one machine as a hardware description, to plan and simulate other models and clusters.

Arithmetic has the measured rates over the peak of the named device. What one machine cannot measure (links to other
nodes, loading) comes from the named description, and `source` says so.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from lengthwise.core.errors import ConfigError
from lengthwise.core.measurements import HARDLY_KNOWN, Measurements
from lengthwise.core.names import counted
from lengthwise.cost.analytic import flops_coefficients
from lengthwise.cost.hardware import Hardware, named_hardware
from lengthwise.cost.memory import DTYPE_BYTES


def hardware_from_measurements(
    found: Measurements,
    *,
    device_bytes: float | None = None,
    host_bytes: float | None = None,
    ranks_per_node: int | None = None,
) -> Hardware:
    """Return the description of the measured device.

    Args:
        found: measurements of a model whose parameters all trained.
        device_bytes, host_bytes: memory of a device and of its host (default: that of the file's named hardware).
        ranks_per_node: devices of a node (default: the named hardware's).

    Raises:
        ConfigError: measurements of adapters.
    """
    if found.adapters is not None:
        expected, remedy = "measurements of a model whose parameters all train", "Profile without {lora}."
        raise ConfigError("hardware description", expected=expected, got="of adapters", remedy=remedy)
    base = named_hardware(found.hardware).in_nodes(ranks_per_node)
    given: dict[str, Any] = {"device_bytes": device_bytes, "host_bytes": host_bytes}
    measured = {**_arithmetic(found, base), **_links(found), **{k: v for k, v in given.items() if v is not None}}
    if copies := measured.get("copy_bytes_per_second"):  # of all ranks at once, so the host has at least their sum
        measured["host_copy_bytes_per_second"] = max(base.host_copy_bytes_per_second, copies * found.place.ranks)
    own: dict[str, Any] = {"kernel": "", "kernels": ()}  # the measured speed of attention belongs to no named kernel
    own |= {"name": "-".join(found.place.device.lower().split()), "compute_dtype_bytes": DTYPE_BYTES[found.precision]}
    return replace(base, **own, **measured, source=_source(found, base, tuple(measured)))


def hardware_to_json(hardware: Hardware) -> str:
    """Return a description as JSON that `named_hardware` reads."""
    values = {key: value for key, value in asdict(hardware).items() if key not in ("name", "kernel", "kernels")}
    return json.dumps(values, indent=1) + "\n"


def _arithmetic(found: Measurements, base: Hardware) -> dict[str, Any]:
    """Return peak, efficiencies, block curve and overhead; a term of 0 gives no rate."""
    terms, shape = found.fit.known, found.model
    rates = {}
    for name, flops, term in zip(
        ("linear_efficiency", "attention_efficiency"),
        flops_coefficients(shape),
        ("linear_seconds", "quadratic_seconds"),
        strict=True,
    ):
        if term in terms and terms[term].value > 0:
            rates[name] = flops / terms[term].value
    peak = max(base.peak_flops_per_second, *rates.values())
    values: dict[str, Any] = {name: rate / peak for name, rate in rates.items()}
    if peak > base.peak_flops_per_second:
        values["peak_flops_per_second"] = peak
        for name in {"linear_efficiency", "attention_efficiency"} - set(rates):
            values[name] = getattr(base, name) * base.peak_flops_per_second / peak
    if found.fit.block_efficiency:
        values |= {"block_efficiency": found.fit.block_efficiency, "ring_efficiency": found.fit.ring_efficiency}
    if "fixed_seconds" in terms:
        values["layer_launch_seconds"] = terms["fixed_seconds"].value / shape.layers
    return values


def _links(found: Measurements) -> dict[str, Any]:
    values = {}
    layers = found.model.layers
    keys = {
        "near_bytes_per_second": ("node_link_bytes_per_second", 1),
        "near_hop_seconds": ("node_hop_latency_seconds", layers),
        "far_bytes_per_second": ("link_bytes_per_second", 1),
        "far_hop_seconds": ("hop_latency_seconds", layers),
        "copy_bytes_per_second": ("copy_bytes_per_second", 1),
    }
    for name, term in found.fit.known.items():
        if name in keys:
            key, parts = keys[name]
            values[key] = term.value / parts
    return values


def _source(found: Measurements, base: Hardware, measured: tuple[str, ...]) -> str:
    place = found.place
    versions = ", ".join(f"{name} {version}" for name, version in place.versions.items())
    return (
        f"Measured by `lengthwise profile` on {found.date} with {found.model.name} in {found.precision}, "
        f"{counted(place.ranks, 'rank')} of {counted(place.threads, 'thread')} on {place.device} ({place.processor}), "
        f"{versions}: "
        f"{', '.join(measured)}. Not measured, or with an error over {HARDLY_KNOWN:.0%}, but taken from {base.name}: "
        "all other keys, and the peak that efficiencies are relative to, unless it is listed above."
    )
