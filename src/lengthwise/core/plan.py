"""The plan of one step and its file, `lengthwise.plan/1`, which planner, trainer and other tools share.

Microbatches have one global order; each starts when all its ranks are free. Format: `docs/plan-file.md`; rules between
its numbers: `program.check_plan`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from lengthwise.core.errors import PlanError
from lengthwise.core.files import is_deeper, unique_keys
from lengthwise.core.shape import UNCUT, LayerCut
from lengthwise.core.sizes import MOST, is_number

SCHEMA = "lengthwise.plan/1"
KNOWN_FEATURES = frozenset({"branches", "heads", "shares", "pipeline", "waves"})
SCHEDULE_KINDS = ("free", "waves", "pipeline")
_MOST_DEPTH = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """The parts of a decoder layer that backward runs again, beside its norms, RoPE and activations.

    attention: attention and its ring. products: products of matrices.
    """

    attention: bool
    products: bool


RECOMPUTED: Mapping[str, Again | None] = {
    "none": None,
    "layer": Again(attention=True, products=True),
    "all_but_attention": Again(attention=False, products=True),
    "elementwise": Again(attention=False, products=False),
}
"""Kinds of recomputation (activation checkpointing), and what backward runs again."""
RECOMPUTE_KINDS = tuple(RECOMPUTED)
STRONGER = {"none": "elementwise", "elementwise": "all_but_attention"}
"""The kind that the first layers of a microbatch may have, by the kind of the others. No ring runs again in either."""
_MIX = re.compile(r"(\w+)\+([1-9]\d{0,5})/([1-9]\d{0,5})")


class LayerKinds(NamedTuple):
    """Kinds of recomputation by layer: `stronger` in the first `number` of `layers`, `kind` in the others."""

    kind: str
    stronger: str
    number: int = 0
    layers: int = 1

    @property
    def shares(self) -> tuple[tuple[str, float], ...]:
        """Each kind with its share of the layers."""
        share = self.number / self.layers
        return ((self.kind, 1 - share), (self.stronger, share)) if share else ((self.kind, 1.0),)

    def of(self, layer: int) -> str:
        """Return the kind of a layer, the first of which is 0."""
        return self.stronger if layer < self.number else self.kind

    def __str__(self) -> str:
        return f"{self.kind}+{self.number}/{self.layers}" if self.number else self.kind


@cache
def kinds_by_layer(recompute: str) -> LayerKinds:
    """Read a recomputation: one of `RECOMPUTE_KINDS`, or a mix such as `elementwise+6/36`.

    In the mix 6 of 36 layers have the kind that is `STRONGER`. ValueError: neither.
    """
    if recompute in RECOMPUTED:
        return LayerKinds(recompute, recompute)
    found = _MIX.fullmatch(recompute)
    if found is None or found[1] not in STRONGER or not 0 < int(found[2]) < int(found[3]):
        some = ", ".join(f"{kind}+N/LAYERS" for kind in STRONGER)
        raise ValueError(f"{', '.join(RECOMPUTE_KINDS)}, or with N of LAYERS layers by a stronger kind {some}")
    return LayerKinds(found[1], STRONGER[found[1]], int(found[2]), int(found[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Sequences that share one set of ranks: one long sequence cut over a ring, or short ones packed together.

    `ranks` is in ring order: position j sends to position j + 1 and holds chunks j and 2d-1-j of every sequence.
    """

    ranks: tuple[int, ...]
    sequences: tuple[int, ...]
    heads: int = 1
    shares: tuple[float, ...] | None = None

    @property
    def degree(self) -> int:
        """Number of ranks over which each sequence of the piece is cut."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One forward and backward pass of a set of ranks, over one or more pieces."""

    pieces: tuple[Piece, ...]
    offload: float = 0.0
    recompute: str = "none"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all pieces, ascending."""
        return tuple(sorted({rank for piece in self.pieces for rank in piece.ranks}))


class ImageWork(NamedTuple):
    """The work of a model's tower on images, in tokens of the linear work of its decoder.

    total: on all images of a sequence. largest: on one of them; a rank that holds one of its tokens does all of it.
    """

    total: float = 0.0
    largest: float = 0.0


Images: TypeAlias = Sequence[Sequence[tuple[int, float]]]
"""For each sequence (first token, work) of its images, as in `ImageWork`; () if none has any."""


class WithImages(list[int]):
    """Lengths of sequences in tokens, with the work on their images."""

    def __init__(self, lengths: Iterable[int], images: Images) -> None:
        super().__init__(lengths)
        self.images = images


def images_beside(lengths: Sequence[int]) -> Images:
    """Return the work on the images of sequences; () for plain lengths."""
    return getattr(lengths, "images", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The ordered microbatches of one step.

    tokens: length of each sequence. parents: per sequence, the sequence that it continues, or None; () if none does. A
    sequence sees all tokens of those that it continues. images: the work of a tower on each sequence's images, for
    costs; () if none has images. notes: facts that running it does not need (planner, predicted seconds, bound),
    written as extra top-level keys.
    """

    ranks: int
    layers: int
    capacity: int
    tokens: tuple[int, ...]
    microbatches: tuple[Microbatch, ...]
    schedule: Mapping[str, Any] = field(default_factory=lambda: {"kind": "free"})
    requires: tuple[str, ...] = ()
    parents: tuple[int | None, ...] = ()
    images: tuple[ImageWork, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cut(self) -> LayerCut:
        """Pipeline stages and chunks of each rank; `UNCUT` unless the plan's kind is `pipeline`."""
        is_cut, of = self.schedule["kind"] == "pipeline", self.schedule.get
        return LayerCut(stages=of("stages", 1), virtual=of("virtual", 1)) if is_cut else UNCUT

    @property
    def firsts(self) -> tuple[int, ...]:
        """Position of each sequence's first token, in a checked plan: the number of tokens that it continues."""
        lines = (line_to(sequence, self.parents) for sequence in range(len(self.tokens)))
        return tuple(sum(self.tokens[one] for one in line[:-1]) for line in lines)

    @property
    def ring_tokens(self) -> int:
        """Number of tokens of the sequences that are cut over several ranks."""
        return sum(self.tokens[i] for m in self.microbatches for p in m.pieces if p.degree > 1 for i in p.sequences)

    def replacing(self, others_of: Callable[[int], Iterable[int]]) -> tuple[Microbatch, ...]:
        """Return the microbatches with every sequence replaced by others."""

        def of(piece: Piece) -> Piece:
            return replace(piece, sequences=tuple(other for one in piece.sequences for other in others_of(one)))

        return tuple(replace(each, pieces=tuple(map(of, each.pieces))) for each in self.microbatches)

    def to_json(self) -> str:
        """Return the text of the plan file, equal for equal plans, one microbatch per line."""
        head = {
            "schema": SCHEMA,
            "requires": list(self.requires),
            "ranks": self.ranks,
            "layers": self.layers,
            "capacity": self.capacity,
            "tokens": list(self.tokens),
            **({"parents": list(self.parents)} if self.parents else {}),
            **({"images": [list(each) for each in self.images]} if self.images else {}),
            "schedule": dict(self.schedule),
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in {**head, **self.notes}.items()]
        rows = ",\n  ".join(json.dumps(_microbatch_json(m)) for m in self.microbatches)
        return "{" + ",\n ".join(lines) + ',\n "microbatches": [\n  ' + rows + "]}\n"

    def digest(self) -> str:
        """Return the SHA-256 of the plan file, 64 hex digits; all ranks compare it before the first transfer."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> Plan:
        """Read a plan file; PlanError for invalid JSON, a repeated key, a wrong field or an unknown feature."""
        return _read_plan(text, where)


def line_to(sequence: int, parents: Sequence[int | None]) -> list[int]:
    """Return the sequences that a sequence continues, in the order of the text, and then itself."""
    line = [sequence]
    while parents and (parent := parents[line[-1]]) is not None:
        line.append(parent)
    return line[::-1]


def _microbatch_json(microbatch: Microbatch) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if microbatch.offload:
        extras["offload"] = microbatch.offload
    if microbatch.recompute != "none":
        extras["recompute"] = microbatch.recompute
    pieces = [_piece_json(piece) for piece in microbatch.pieces]
    if len(pieces) == 1 and pieces[0].keys() == {"ranks", "sequences"}:
        return {**pieces[0], **extras}
    return {"pieces": pieces, **extras}


def _piece_json(piece: Piece) -> dict[str, Any]:
    row: dict[str, Any] = {"ranks": list(piece.ranks), "sequences": list(piece.sequences)}
    if piece.heads != 1:
        row["heads"] = piece.heads
    if piece.shares is not None:
        row["shares"] = list(piece.shares)
    return row


def _refuse(where: str, expected: str, got: object) -> PlanError:
    return PlanError(where, expected=expected, got=repr(got), remedy="Correct the plan file or its planner.")


def _read_plan(text: str, where: str) -> Plan:
    try:
        raw = json.loads(text, parse_constant=str, object_pairs_hook=unique_keys)  # NaN becomes "NaN", which is refused
    except (ValueError, RecursionError) as error:  # ValueError also for a repeated key and for thousands of digits
        raise _refuse(where, "a JSON object", str(error)) from None
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        got = raw.get("schema") if isinstance(raw, dict) else raw
        raise _refuse(where, f'an object with "schema": "{SCHEMA}"', got)
    requires = raw.get("requires", [])
    if not isinstance(requires, list) or not all(isinstance(feature, str) for feature in requires):
        raise _refuse(f"{where}: requires", "a list of feature names", requires)
    unknown = sorted(set(requires) - KNOWN_FEATURES)
    if unknown:
        expected = f"features this version knows ({', '.join(sorted(KNOWN_FEATURES))})"
        remedy = "Update lengthwise, or plan again without these features."
        raise PlanError(f"{where}: requires", expected=expected, got=", ".join(unknown), remedy=remedy)
    schedule = raw.get("schedule", {"kind": "free"})
    if not isinstance(schedule, dict) or schedule.get("kind") not in SCHEDULE_KINDS:
        raise _refuse(f"{where}: schedule", f"an object whose kind is one of {', '.join(SCHEDULE_KINDS)}", schedule)
    rows = raw.get("microbatches")
    if not isinstance(rows, list):
        raise _refuse(f"{where}: microbatches", "a list", rows)
    known = {"schema", "microbatches", *(each.name for each in fields(Plan))} - {"notes"}
    notes = {key: value for key, value in raw.items() if key not in known}
    if is_deeper([notes, schedule], _MOST_DEPTH):  # writing and pickling the plan recurse
        raise _refuse(where, f"notes of at most {_MOST_DEPTH} levels", "deeper nesting")
    tokens = _wholes(raw.get("tokens"), f"{where}: tokens", least=1)
    return Plan(
        ranks=_whole(raw.get("ranks"), f"{where}: ranks", least=1),
        layers=_whole(raw.get("layers"), f"{where}: layers", least=1),
        capacity=_whole(raw.get("capacity"), f"{where}: capacity", least=1),
        tokens=tokens,
        schedule=schedule,
        requires=tuple(requires),
        parents=_read_parents(raw.get("parents"), f"{where}: parents"),
        images=read_images(raw.get("images", []), f"{where}: images", len(tokens)),
        microbatches=tuple(_read_microbatch(row, f"{where}: microbatch {i}") for i, row in enumerate(rows)),
        notes=notes,
    )


def _read_parents(value: object, where: str) -> tuple[int | None, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not value:
        raise _refuse(where, "a list with a sequence or null for each sequence", value)
    return tuple(None if one is None else _whole(one, f"{where}[{i}]", least=0) for i, one in enumerate(value))


def read_images(value: object, where: str, sequences: int) -> tuple[ImageWork, ...]:
    """Read `images` of a plan file; PlanError for another form."""
    if not isinstance(value, list) or len(value) not in (0, sequences):
        raise _refuse(where, f"a list with an entry for each of {sequences} sequences", value)
    for i, each in enumerate(value):
        if not (isinstance(each, list) and len(each) == 2 and all(is_number(x) and 0 <= x <= MOST for x in each)):
            raise _refuse(f"{where}[{i}]", f"two numbers from 0 to {MOST}", each)
        if each[1] > each[0]:
            raise _refuse(f"{where}[{i}]", "the work of all images, and not more for the largest", each)
    return tuple(ImageWork(*each) for each in value)


def _read_microbatch(row: object, where: str) -> Microbatch:
    if not isinstance(row, dict):
        raise _refuse(where, "an object", row)
    pieces = row.get("pieces")
    if pieces is None:
        pieces = [{key: row[key] for key in ("ranks", "sequences", "heads", "shares") if key in row}]
    if not isinstance(pieces, list) or not pieces:
        raise _refuse(where, "a non-empty list of pieces", pieces)
    offload, recompute = row.get("offload", 0.0), row.get("recompute", "none")
    if not is_number(offload) or not 0 <= offload <= 1:
        raise _refuse(f"{where}: offload", "a ratio from 0 to 1", offload)
    try:
        kinds_by_layer(str(recompute))
    except ValueError as error:
        raise _refuse(f"{where}: recompute", f"one of {error}", recompute) from None
    read = tuple(_read_piece(piece, f"{where}, piece {i}") for i, piece in enumerate(pieces))
    return Microbatch(pieces=read, offload=float(offload), recompute=recompute)


def _read_piece(row: object, where: str) -> Piece:
    if not isinstance(row, dict):
        raise _refuse(where, "an object with ranks and sequences", row)
    shares = row.get("shares")
    if shares is not None and not (isinstance(shares, list) and all(is_number(s) and 0 <= s <= MOST for s in shares)):
        raise _refuse(f"{where}: shares", f"a list of numbers from 0 to {MOST}", shares)
    return Piece(
        ranks=_wholes(row.get("ranks"), f"{where}: ranks", least=0),
        sequences=_wholes(row.get("sequences"), f"{where}: sequences", least=0),
        heads=_whole(row.get("heads", 1), f"{where}: heads", least=1),
        shares=None if shares is None else tuple(shares),
    )


def _whole(value: object, where: str, *, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
        raise _refuse(where, f"a whole number from {least} to {MOST}", value)
    return value


def _wholes(value: object, where: str, *, least: int) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _refuse(where, "a list of whole numbers", value)
    return tuple(_whole(item, f"{where}[{i}]", least=least) for i, item in enumerate(value))
