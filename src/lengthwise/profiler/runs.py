"""What a profile times, as data (microbatches, rings, blocks, messages, copies), and the samples of the times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.core.measurements import Clock, Kind, Sample, Tier
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.program.ring_order import ring_order

SHORTEST_TOKENS = 32
MESSAGE_BYTES = (1 << 14, 1 << 18, 1 << 20, 1 << 22)
IMAGE_TOKENS = (16, 4096)  # of the smallest images, and of the largest
COPY_BYTES = (1 << 20, 1 << 22, 1 << 24)
GPU_TIMES = 16  # times the bytes on GPUs, whose links move a few MB faster than a call (one H200: 16 MiB in 0.7 ms)
_NO_CAPACITY = 1 << 40  # tokens; these plans are not checked against a cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRun:
    """One thing to time: a plan; a block, embedding, head or images of `lengths`; messages or copies of `num_bytes`."""

    kind: Kind
    lengths: tuple[int, ...] = ()
    degree: int = 1
    tier: Tier = "none"
    num_bytes: int = 0
    image_work: float = 0.0
    plan: Plan | None = None


def local_run(lengths: Sequence[int], ranks: int, layers: int) -> ProfiledRun:
    """Return the run of a pack of these lengths on every rank at the same time."""
    packs = [tuple(range(rank * len(lengths), (rank + 1) * len(lengths))) for rank in range(ranks)]
    pieces = [Piece(ranks=(rank,), sequences=pack) for rank, pack in enumerate(packs)]
    plan = _plan(tuple(lengths) * ranks, pieces, ranks, layers)
    return ProfiledRun(kind="local", lengths=tuple(lengths), plan=plan)


def ring_runs(lengths: Sequence[int], ranks: int, ranks_per_node: int, layers: int) -> list[ProfiledRun]:
    """Return runs of one pack on rings of 2, 4, 8 ... and of all ranks, and on two ranks across a border of nodes."""
    degrees = sorted({*(2**power for power in range(1, ranks.bit_length()) if 2**power <= ranks), ranks} - {1})
    firsts = [(0, degree) for degree in degrees]
    if 1 < ranks_per_node < ranks:
        firsts.append((ranks_per_node - 1, 2))
    sequences = tuple(range(len(lengths)))
    runs = []
    for first, degree in firsts:
        near = first // ranks_per_node == (first + degree - 1) // ranks_per_node
        piece = Piece(ranks=ring_order(first, degree), sequences=sequences)
        plan = _plan(tuple(lengths), [piece], ranks, layers)
        tier: Tier = "near" if near else "far"
        runs.append(ProfiledRun(kind="ring", lengths=tuple(lengths), degree=degree, tier=tier, plan=plan))
    return runs


def message_runs(ranks: int, ranks_per_node: int, *, times: int = 1) -> list[ProfiledRun]:
    """Return runs of messages from every rank to the next of its node, and to the same place of the next node.

    times: factor of the bytes.
    """
    tiers: list[Tier] = [*(("near",) if ranks_per_node > 1 else ()), *(("far",) if ranks > ranks_per_node else ())]
    return [
        ProfiledRun(kind="transfer", num_bytes=times * size, degree=min(ranks, 2), tier=tier)
        for tier in tiers
        for size in MESSAGE_BYTES
    ]


def copy_runs(*, times: int = 1) -> list[ProfiledRun]:
    """Return runs in which every rank copies to the offload store and back. times: factor of the bytes."""
    return [ProfiledRun(kind="copy", num_bytes=times * size) for size in COPY_BYTES]


def packs_up_to(longest: int) -> list[tuple[int, ...]]:
    """Return packs of about as many tokens as the longest length that ran: even, short, and uneven ones."""
    eighth = max(1, longest // 8)
    return [(eighth,) * 4, (max(1, longest // 32),) * 16, (longest // 2 + 1, eighth, eighth), (eighth * 3, eighth * 2)]


def _plan(tokens: tuple[int, ...], pieces: Sequence[Piece], ranks: int, layers: int) -> Plan:
    microbatches = tuple(Microbatch(pieces=(piece,)) for piece in pieces)
    return Plan(ranks=ranks, layers=layers, capacity=_NO_CAPACITY, tokens=tokens, microbatches=microbatches)


def sample_of(run: ProfiledRun, seconds: np.ndarray, clock: Clock) -> Sample:
    """Return the sample of a run. seconds: [ranks, rounds, (all, waits, forward)]."""
    if run.kind == "ring":
        assert run.plan is not None, run
        seconds = seconds[list(run.plan.microbatches[0].ranks)]
    whole, waited, forward = np.moveaxis(seconds, 2, 0)
    if run.kind in ("local", "block", "ring_block", "copy", "embedding", "head", "images"):
        return _of(run, _usual(whole, clock), whole, None if np.isnan(forward).any() else _usual(forward, clock))
    if clock == "wall":
        return _of(run, _usual(whole.max(axis=0), clock), whole)
    # Waits beyond the shortest of all turns come from other work on the machine.
    return _of(run, float((whole - waited).min(axis=1).max() + waited.min()), whole - waited)


def end_samples(ends: np.ndarray, clock: Clock) -> list[Sample]:
    """Return the samples of a step's end. ends: seconds, [ranks, rounds, (collectives, update, clear)]."""
    kinds: tuple[Kind, ...] = ("end_collectives", "end_update", "end_clear")
    degree = len(ends)
    return [
        _of(ProfiledRun(kind=kind, degree=degree), _usual(ends[..., part].max(axis=0), clock), ends[..., part])
        for part, kind in enumerate(kinds)
        if kind != "end_collectives" or degree > 1
    ]


def _usual(seconds: np.ndarray, clock: Clock) -> float:
    """Return the repeat that counts: other work adds to wall seconds, and slows single CPU seconds."""
    return float(np.quantile(seconds, 0.25 if clock == "wall" else 0.0))


def _of(run: ProfiledRun, seconds: float, repeats: np.ndarray, forward_seconds: float | None = None) -> Sample:
    """Return a sample; `repeats`, [ranks, rounds], give its spread."""
    seconds = max(seconds, 1e-9)
    lower, upper = np.quantile(repeats, (0.25, 0.75))
    return Sample(
        kind=run.kind,
        lengths=run.lengths,
        degree=run.degree,
        tier=run.tier,
        num_bytes=run.num_bytes,
        seconds=seconds,
        forward_seconds=forward_seconds,
        repeats=repeats.shape[1],
        spread=float(upper - lower) / seconds,
        image_work=run.image_work,
    )
