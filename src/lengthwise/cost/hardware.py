"""Hardware descriptions: what one device, its links and its node achieve. Data with sources: `hardware.json`.

Efficiencies are achieved ones; their ratio sets the length at which attention begins to outweigh other work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np

from lengthwise.core.errors import ConfigError, raise_problems
from lengthwise.core.files import is_path, read_json_object, read_package_json
from lengthwise.core.names import unknown_name
from lengthwise.cost.blocks import Curve, speed_shares

_DESCRIPTIONS = read_package_json("lengthwise.cost", "hardware.json")
HARDWARE_NAMES = tuple(_DESCRIPTIONS)
_GPUS = ("h200", "h100", "a100")  # named descriptions; a GPU whose name contains one has it
_OTHER_GPUS = "h100"
_MAY_BE_ZERO = ("hop_latency_seconds", "node_hop_latency_seconds", "layer_launch_seconds")
_MOST = 1e30  # limit of numbers here, and its inverse the least: products of a few stay finite
_NO_NUMBERS = ("name", "source", "block_efficiency", "ring_efficiency", "fused_norms", "kernel", "kernels")
_OPTIONAL = (
    *("memory_bytes_per_second", "node_ring_bytes_per_second", "ring_efficiency", "fused_norms", "kernel", "kernels"),
)
_OF_KERNEL = ("attention_efficiency", "block_efficiency", "ring_efficiency")
_WHOLE = ("ranks_per_node", "compute_dtype_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """The speed of an attention kernel on a device, with the efficiencies of `Hardware`."""

    name: str
    attention_efficiency: float
    block_efficiency: Curve
    ring_efficiency: Curve = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device, the links of its transfers, and the node that it shares.

    peak_flops_per_second: peak rate of dense matrix products in the compute type.
    linear_efficiency, attention_efficiency: achieved share of the peak, above 0 to 1; for attention by `kernel`,
        forward and backward together.
    block_efficiency: (tokens, share of attention's speed) of a document on one rank, or of a ring's diagonal, of so
        many tokens; the last share 1; interpolated between points, below the first in proportion to the tokens.
    ring_efficiency: the same of a ring's other blocks, by the tokens of a rank: of all these queries and the keys of
        half as many, or the reverse. No faster than a document of twice the tokens (default: `block_efficiency`).
    link_bytes_per_second, hop_latency_seconds: rate of a rank's link to another node, one direction; start of one.
    node_link_bytes_per_second, node_hop_latency_seconds: the same inside a node.
    node_ring_bytes_per_second: rate of a node's link that rings and split heads of this engine reach, whose transfers
        have few thread blocks so that they run beside attention (default: all of it).
    node_uplink_bytes_per_second: rate from all devices of a node together to other nodes, one direction.
    ranks_per_node: number of devices of one node.
    layer_launch_seconds: overhead of one layer, forward and backward, whatever its tokens.
    compute_dtype_bytes: bytes of a number: 2 for bf16, 4 for fp32.
    copy_bytes_per_second: rate between one device and its host, one direction.
    host_copy_bytes_per_second: rate between the host and all devices of the node together.
    memory_bytes_per_second: rate of the device's own memory, by which quantized weights are unpacked (default 1e12).
    device_bytes, host_bytes: memory of one device, and of a node's host.
    source: source of the numbers.
    fused_norms: True if models run with norms that keep less for backward (`cost.memory`).
    kernel: name in `kernels` of the attention kernel with this speed; both may be left out.

    Raises:
        Problems, ConfigError: numbers out of range, or an invalid block curve; all are reported.
    """

    name: str
    peak_flops_per_second: float
    linear_efficiency: float
    attention_efficiency: float
    link_bytes_per_second: float
    hop_latency_seconds: float
    layer_launch_seconds: float
    compute_dtype_bytes: int
    ranks_per_node: int
    node_link_bytes_per_second: float
    node_hop_latency_seconds: float
    node_uplink_bytes_per_second: float
    block_efficiency: Curve
    copy_bytes_per_second: float
    host_copy_bytes_per_second: float
    device_bytes: float
    host_bytes: float
    source: str
    memory_bytes_per_second: float = 1e12
    node_ring_bytes_per_second: float = _MOST
    fused_norms: bool = False
    ring_efficiency: Curve = ()
    kernel: str = ""
    kernels: tuple[AttentionKernel, ...] = ()

    def with_kernel(self, name: str) -> Hardware:
        """Return the same device with another kernel's attention; ConfigError: its speed is not known."""
        found = next((kernel for kernel in self.kernels if kernel.name == name), None)
        if found is None:
            raise unknown_name("kernel", name, [kernel.name for kernel in self.kernels], others=f"on {self.name}")
        return replace(self, kernel=name, **{key: getattr(found, key) for key in _OF_KERNEL})

    def in_nodes(self, devices: int | None) -> Hardware:
        """Return the device in nodes of `devices` (default: in nodes as they are), with uplinks in proportion."""
        nodes = devices or self.ranks_per_node
        uplink = self.node_uplink_bytes_per_second / self.ranks_per_node * nodes
        return replace(self, ranks_per_node=nodes, node_uplink_bytes_per_second=uplink)

    def __post_init__(self) -> None:
        problems = []
        for name in (field.name for field in fields(self) if field.name not in _NO_NUMBERS):
            value = getattr(self, name)
            most = 1.0 if name.endswith("efficiency") else _MOST
            number = isinstance(value, int if name in _WHOLE else int | float) and not isinstance(value, bool)
            good = number and (1 / _MOST <= value <= most or (value == 0 and name in _MAY_BE_ZERO))
            if not good:
                expected = "a share above 0, at most 1" if most == 1.0 else f"a number above 0, at most {_MOST:g}"
                problems.append(self._problem(name, f"{expected}{', whole' if name in _WHOLE else ''}", value))
        if not isinstance(self.source, str) or not self.source:
            problems.append(self._problem("source", "a text that says where the numbers come from", self.source))
        if not isinstance(self.fused_norms, bool):
            problems.append(self._problem("fused_norms", "true or false", self.fused_norms))
        curves = self.block_efficiency, self.ring_efficiency or self.block_efficiency
        for name, curve in zip(_OF_KERNEL[1:], curves, strict=True):
            if not _is_curve(curve):
                expected = "pairs of tokens, ascending, and a share of speed that does not fall, to 1"
                problems.append(self._problem(name, expected, curve))
        if not problems and not _cuts_gain_nothing(*curves):
            expected = "no block faster than a document of twice its tokens"
            problems.append(self._problem("ring_efficiency", expected, self.ring_efficiency))
        raise_problems(problems)

    def _problem(self, name: str, expected: str, got: object) -> ConfigError:
        return ConfigError(
            f"hardware {self.name}: {name}", expected=expected, got=repr(got), remedy="Fix the hardware description."
        )


def _is_curve(points: object) -> bool:
    """Return whether speed grows with the tokens of a block, as the searches need: cutting adds to the arithmetic."""
    if not isinstance(points, tuple) or not points or not all(len(point) == 2 for point in points):
        return False
    if not all(isinstance(x, int | float) and math.isfinite(x) and x > 0 for point in points for x in point):
        return False
    return points[-1][1] == 1 and all(a < b and p <= q for (a, p), (b, q) in pairwise(points))


def _cuts_gain_nothing(documents: Curve, rings: Curve) -> bool:
    """Return whether a ring's blocks are no faster than a document of two ranks' tokens; both are checked curves."""
    tokens = np.array([*(at for at, _ in rings), *(at / 2 for at, _ in documents)])
    return bool(np.all(speed_shares(rings, tokens) <= speed_shares(documents, 2 * tokens) * (1 + 1e-9)))


def named_hardware(name: str) -> Hardware:
    """Return the description with a name of `HARDWARE_NAMES`, or of a JSON file (a path with a slash or .json).

    Raises:
        ConfigError: an unknown name (it suggests the nearest one), or a file that is not a description.
    """
    if is_path(name):
        return hardware_from_json(read_json_object(name), name)
    if name not in _DESCRIPTIONS:
        raise unknown_name("hardware", name, HARDWARE_NAMES, others="or the path of a JSON file (with / or .json)")
    return hardware_from_json(_DESCRIPTIONS[name], name)


def hardware_of_gpu(device: str) -> tuple[str, str | None]:
    """Return the named hardware for a GPU, and a note for the user if it is not the same GPU, else None."""
    lowered = device.lower()
    found = next((name for name in _GPUS if name in lowered), None)
    if found is not None:
        return found, None
    said = f"{device} is planned with the figures of {_OTHER_GPUS}: only their ratios matter for a plan"
    return _OTHER_GPUS, f"{said}; `lengthwise profile` measures this one's"


def hardware_from_json(raw: Mapping[str, Any], name: str) -> Hardware:
    """Read a description from its JSON object; ConfigError or Problems: missing, unknown or wrong keys."""
    known = [field.name for field in fields(Hardware) if field.name != "name"]
    problems: list[ConfigError] = [
        unknown_name(f"hardware {name}: {key}", key, known) for key in raw if key not in known
    ]
    kernels = _kernels(raw.get("kernels", {}))
    chosen = next((each for each in kernels if each.name == raw.get("kernel")), None)
    own = [key for key in _OF_KERNEL if key in raw]  # a speed given directly belongs to no named kernel
    values = {**({} if chosen is None else {key: getattr(chosen, key) for key in _OF_KERNEL}), **raw}
    if "block_efficiency" in own and "ring_efficiency" not in own:
        values["ring_efficiency"] = []
    missing = [key for key in known if key not in values and key not in _OPTIONAL]
    if missing:
        remedy = "Add them; `lengthwise/cost/hardware.json` shows every key."
        problems.append(ConfigError(f"hardware {name}", expected=", ".join(missing), got="nothing", remedy=remedy))
    raise_problems(problems)
    kernel = "" if own or chosen is None else chosen.name
    curves = {key: _points(values.get(key, [])) for key in _OF_KERNEL[1:]}
    changes = {**curves, "kernel": kernel, "kernels": kernels}
    return Hardware(name=name, **{**values, **changes})


def _kernels(raw: object) -> tuple[AttentionKernel, ...]:
    """Read the kernels of a description; leave out invalid ones."""
    if not isinstance(raw, Mapping):
        return ()
    return tuple(
        AttentionKernel(
            name=name,
            attention_efficiency=each["attention_efficiency"],
            block_efficiency=_points(each["block_efficiency"]),
            ring_efficiency=_points(each.get("ring_efficiency", [])),
        )
        for name, each in raw.items()
        if isinstance(each, Mapping) and set(_OF_KERNEL[:2]) <= set(each)
    )


def _points(points: Any) -> Any:
    """Make tuples of a JSON list's pairs; leave anything else, to be refused."""
    if not isinstance(points, list):
        return points
    return tuple(tuple(point) if isinstance(point, list) else () for point in points)
