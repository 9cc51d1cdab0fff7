"""Hardware descriptions: what one device and its link do in practice. Data with sources, in `hardware.json`.

Efficiencies are achieved ones. Their ratio matters more than their height: it sets from which length on attention
outweighs the rest, and so which sequences are worth a ring.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from lengthwise.core.errors import ConfigError
from lengthwise.core.names import unknown_name
from lengthwise.cost.package_data import read_package_json

_DESCRIPTIONS = read_package_json("lengthwise.cost", "hardware.json")
HARDWARE_NAMES = tuple(_DESCRIPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device and the link that its ring transfers take.

    peak_flops_per_second: of matrix products in the compute type, dense.
    linear_efficiency, attention_efficiency: share of the peak that is reached, above 0 and at most 1.
    link_bytes_per_second: one direction of the link of one rank.
    hop_latency_seconds: start of one transfer, on top of its bytes.
    layer_launch_seconds: overhead of one layer, forward and backward, that does not grow with tokens.
    compute_dtype_bytes: 2 for bf16, 4 for fp32.
    source: where the numbers come from.
    """

    name: str
    peak_flops_per_second: float
    linear_efficiency: float
    attention_efficiency: float
    link_bytes_per_second: float
    hop_latency_seconds: float
    layer_launch_seconds: float
    compute_dtype_bytes: int
    source: str

    def __post_init__(self) -> None:
        may_be_zero = ("hop_latency_seconds", "layer_launch_seconds")
        for name in (field.name for field in fields(self) if field.name not in ("name", "source")):
            value = getattr(self, name)
            most = 1.0 if name.endswith("efficiency") else math.inf
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or value > most or (value == 0 and name not in may_be_zero):
                raise ConfigError(
                    f"hardware {self.name}: {name}",
                    expected="a share above 0, at most 1" if most == 1.0 else "a finite positive number",
                    got=repr(value),
                    remedy="Mend the hardware description.",
                )


def named_hardware(name: str) -> Hardware:
    """Look up a description that ships with the package.

    Raises:
        ConfigError: unknown name; the nearest one is given.
    """
    if name not in _DESCRIPTIONS:
        raise unknown_name("hardware", name, HARDWARE_NAMES)
    return Hardware(name=name, **_DESCRIPTIONS[name])
