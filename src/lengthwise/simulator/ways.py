"""The ways to train that a simulation compares, and how each did: the records of its answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lengthwise.cost.shard_choice import Shard

OURS = "Lengthwise"
BY_WORK = "FSDP2, own sampler"  # the quicker of the last two, if packs of like work run side by side
LAYOUTS: tuple[Shard, ...] = ("zero1", "zero3", "hybrid")  # of parameters over the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class WaySettings:
    """How one way trains; what does not concern it is None.

    recompute: a kind of recomputation. capacity_tokens: of a device and microbatch. size, by_length: of padded
    microbatches. degree: of all its rings. sorted: packs run longest first. layout: of Lengthwise's parameters.
    offloads: activations may go to the host, without which nothing holds the sequences; of a row: some do.
    """

    recompute: str
    capacity_tokens: int
    size: int | None = None
    by_length: bool | None = None
    degree: int | None = None
    sorted: bool = False
    layout: str | None = None
    offloads: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSpan:
    """A stretch of a rank's time in the first batch, in seconds; `kind` is local or ring."""

    rank: int
    start: float
    end: float
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WayRow:
    """One way to train. step_seconds: entry i of batch i; empty: it cannot hold the sequences, see `refusal`.

    memory_bytes: peak of the fullest device, by formula. stretches: of the first batch. degrees: its distinct pairs of
    a sequence's tokens and ranks, for Lengthwise alone.
    """

    name: str
    settings: WaySettings | None = None
    step_seconds: tuple[float, ...] = ()
    memory_bytes: float = 0.0
    refusal: str = ""
    stretches: tuple[WorkSpan, ...] = ()
    degrees: tuple[tuple[int, int], ...] = ()

    @property
    def mean_seconds(self) -> float:
        """Step time, mean over batches."""
        return float(np.mean(self.step_seconds))

    @property
    def layout(self) -> str:
        """Of Lengthwise's parameters; "": of a row that has none."""
        return "" if self.settings is None else self.settings.layout or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The rows of ways that exist on these devices, ours last.

    layouts: Lengthwise at each layout, in the order of `LAYOUTS`. auto: the one of `shard: auto`, which is our row; "":
    none fits without offload, and our row is the quickest with it.
    longest: tokens of the longest sequence. kernel: whose speed of attention was taken. only_attends: whether no layer
    mixes tokens otherwise, with states or convolutions.
    """

    rows: tuple[WayRow, ...]
    devices: int
    hardware: str
    kernel: str
    batch_tokens: int
    longest: int
    layouts: tuple[WayRow, ...] = ()
    auto: str = ""
    only_attends: bool = True

    @property
    def ours(self) -> WayRow:
        """The row of Lengthwise."""
        return self.rows[-1]

    @property
    def best_other(self) -> WayRow | None:
        """The quickest row of the others, of equals in three digits the first; None: none fits."""
        fitting = [row for row in self.rows[:-1] if row.step_seconds]
        return min(fitting, key=lambda row: float(f"{row.mean_seconds:.3g}"), default=None)
