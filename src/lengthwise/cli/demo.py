"""`lengthwise demo`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Demo."""

    def run(self) -> int:
        return 0
