"""What the end of a step costs beside its bytes, where that was measured: the update, and what no rank shares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The step's end of one rank.

    update_seconds: of the optimizer's update of all parameters, of which W ranks do 1 / W each.
    clear_seconds: of what every rank does for itself, however many there are.
    reduced_bytes_per_second: how fast collectives move what a rank reduces and gathers; None: as fast as the links.
    """

    update_seconds: float = 0.0
    clear_seconds: float = 0.0
    reduced_bytes_per_second: float | None = None

    def seconds(self, reduced_bytes: float, ranks: int, link_bytes_per_second: float) -> float:
        """Return the seconds of a step's end that reduces and gathers so many bytes a rank."""
        rate = self.reduced_bytes_per_second or link_bytes_per_second
        return reduced_bytes * (ranks - 1) / ranks / rate + self.update_seconds / ranks + self.clear_seconds
