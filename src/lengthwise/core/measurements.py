"""Times measured on a machine and the coefficients fitted to them: `lengthwise.measurements/1`, a JSON file.

`lengthwise profile` writes it; `plan`, `simulate` and `train` read it. It has the samples, the machine they were taken
on, and the fit, which planning uses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from lengthwise.core.shape import ModelShape

SCHEMA = "lengthwise.measurements/1"

Kind = Literal[
    "local",
    "ring",
    "block",
    "ring_block",
    "transfer",
    "copy",
    "embedding",
    "head",
    "images",
    "end_collectives",
    "end_update",
    "end_clear",
]
Tier = Literal["none", "near", "far"]
TermName = Literal[
    "quadratic_seconds",
    "linear_seconds",
    "fixed_seconds",
    "forward_attention",
    "forward_linear",
    "near_bytes_per_second",
    "near_hop_seconds",
    "far_bytes_per_second",
    "far_hop_seconds",
    "copy_bytes_per_second",
    "reduced_bytes_per_second",
    "update_seconds",
    "clear_seconds",
    "embedding_seconds",
    "head_seconds",
    "image_ratio",
]
ARITHMETIC: tuple[TermName, ...] = ("quadratic_seconds", "linear_seconds", "fixed_seconds")
HARDLY_KNOWN = 0.5  # relative error
Clock = Literal["wall", "cpu"]
Precision = Literal["fp32", "bf16", "fp64"]

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_Count = Annotated[int, Field(ge=1)]
_Name = Annotated[str, Field(min_length=1)]
_AboveZero = Annotated[float, Field(gt=0)]
_FromZero = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One part of a step that a rank ran repeatedly.

    kind: "local", a microbatch of packs on each rank; "ring", sequences over `degree` ranks; "block", one layer's
        causal attention, the kernel alone; "ring_block", the same queries and half as many keys, all seen; "transfer",
        a message to the next rank and one from it; "copy", activations to the offload store and back, on all ranks at
        once; "embedding" and "head" (with the loss), alone; "images", the tower alone; and of the step's end
        "end_collectives", "end_update" (AdamW on this rank's slice) and "end_clear".
    lengths: tokens of each sequence, or of all images. degree: number of ranks that took part.
    image_work: work on the images as plans count it, in tokens of linear work.
    tier: slowest link in use: none, inside a node (near), or between nodes (far).
    num_bytes: bytes that a rank sent, if the lengths do not determine them.
    seconds: lower quartile of `repeats`; with clock "cpu" the minimum, because other work only adds to it.
    forward_seconds: part of `seconds` before backward; None if not measured.
    spread: interquartile range over `seconds`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    kind: Kind
    lengths: tuple[_Count, ...]
    degree: _Count
    tier: Tier
    num_bytes: Annotated[int, Field(ge=0)]
    seconds: _AboveZero
    forward_seconds: _AboveZero | None
    repeats: _Count
    spread: _FromZero
    image_work: _FromZero = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlace:
    """The machine and software of samples; a run must match it to be planned with them.

    device: "cpu" or a GPU's name. processor: the host's processor. threads: threads per rank. ranks: number of ranks
    that ran together, `ranks_per_node` on each machine. clock: "wall", or "cpu" (seconds of computing plus seconds of
    waiting for messages). versions: versions by package.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    device: _Name
    processor: _Name
    cores: _Count
    threads: _Count
    ranks: _Count
    ranks_per_node: _Count
    clock: Clock
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A fitted coefficient and its relative standard error; None if one sample, or a value of 0, gives none."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    value: _FromZero
    relative_error: _FromZero | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The coefficients fitted to the samples.

    terms: coefficients by the field names of `cost.Cost`, its links and its `ending`. not_measured: terms without a
    sample, which the file's `hardware` gives. block_efficiency, ring_efficiency: as in `Hardware`; empty if not
    measured. mean_error, worst_error: relative errors of the predicted seconds of local and ring samples.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    terms: Mapping[TermName, Term]
    not_measured: tuple[TermName, ...]
    block_efficiency: tuple[tuple[_AboveZero, _AboveZero], ...]
    mean_error: _FromZero
    worst_error: _FromZero
    ring_efficiency: tuple[tuple[_AboveZero, _AboveZero], ...] = ()

    @property
    def known(self) -> Mapping[TermName, Term]:
        """The terms with an error up to `HARDLY_KNOWN`; costs take the others from the named hardware.

        Those of arithmetic are fitted together and stay together.
        """
        return {
            name: term
            for name, term in self.terms.items()
            if name in ARITHMETIC or (term.relative_error or 0.0) <= HARDLY_KNOWN
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """A file of measurements.

    precision: as in a run file. hardware: named hardware whose terms fill the gaps. adapters: number of adapter
    parameters that trained; None if the whole model did.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    schema: Literal["lengthwise.measurements/1"] = SCHEMA
    date: _Name
    place: MeasuredPlace
    model: ModelShape
    precision: Precision
    hardware: _Name
    fit: Fit
    samples: tuple[Sample, ...]
    adapters: _Count | None = None

    def to_json(self) -> str:
        """Return the text of the file: canonical, one sample per line."""
        values = asdict(self)
        head = ",\n ".join(
            f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items() if key != "samples"
        )
        rows = ",\n  ".join(json.dumps(sample) for sample in values["samples"])
        return "{" + head + ',\n "samples": [\n  ' + rows + "]}\n"

    def digest(self) -> str:
        """Return the SHA-256 of the file, 64 hex digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
