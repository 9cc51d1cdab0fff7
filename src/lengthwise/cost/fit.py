"""From samples to coefficients: the times of `lengthwise profile` become the terms of a `Cost`.

Blocks give the curve of block sizes, messages each link's rate, microbatches the seconds per squared token, token,
microbatch and ring step, by least squares of the relative error with no coefficient below 0; exposed transfers are
subtracted with the coefficients of the previous iteration. A term's relative error is its standard error over its
value. After ByteScale (arXiv 2502.21231, section 5.1); docs/decisions/measured-costs.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import get_args

import numpy as np

from lengthwise.core.errors import ConfigError
from lengthwise.core.measurements import ARITHMETIC, Fit, Kind, Sample, Term, TermName, Tier
from lengthwise.cost.blocks import Curve, speed_shares
from lengthwise.cost.choices import Choice
from lengthwise.cost.links import Floats, Link
from lengthwise.cost.terms import Cost

_TURNS = 6
_LEAST_IMAGES = 2  # sizes: for the work, and for what a call takes beside it
_LEAST_LOCAL = 3  # microbatches of one rank: for squared tokens, tokens and the rest
_ABOVE_LAUNCHES = 1.3  # times the shortest pass: below, the device partly waits for the host's launches
_LEAST_SHARE, _MOST_SHARE = 0.02, 0.98  # of forward: a pass without any work would be free
_LINKS: tuple[Tier, ...] = ("near", "far")
_RATES: Mapping[Tier, TermName] = {"near": "near_bytes_per_second", "far": "far_bytes_per_second"}
_HOPS: Mapping[Tier, TermName] = {"near": "near_hop_seconds", "far": "far_hop_seconds"}
_OF_TOWERS: TermName = "image_ratio"
_ENDS: Mapping[Kind, TermName] = {"embedding": "embedding_seconds", "head": "head_seconds"}


@dataclass(frozen=True, slots=True)
class _Solved:
    """Coefficients of a least-squares fit and their standard errors, one per column."""

    values: Floats
    errors: Floats

    def term(self, column: int) -> Term:
        value, error = float(self.values[column]), float(self.errors[column])
        return Term(value=value, relative_error=error / value if value > 0 and np.isfinite(error) else None)


def fit_samples(samples: Sequence[Sample], base: Cost, *, launches_ahead: bool = False) -> Fit:
    """Fit the terms that the samples measure. base: costs of the same model, for all other terms.

    launches_ahead: True if the host launches work ahead of the device, as on GPUs. A short microbatch then takes as
    long as its launches; in a step those hide behind longer microbatches, so short samples are left out.

    Raises:
        ConfigError: fewer than three microbatches on one rank, or seconds that do not grow with tokens.
    """
    curve, rings = block_curves(samples)
    cost = with_curves(base, curve, rings)
    terms: dict[TermName, Term] = {}
    for tier in _LINKS:
        rate = _rate([sample for sample in samples if sample.kind == "transfer" and sample.tier == tier])
        if rate is not None:
            terms[_RATES[tier]] = rate
    if (rate := _rate([sample for sample in samples if sample.kind == "copy"])) is not None:
        terms["copy_bytes_per_second"] = replace(rate, value=2 * rate.value)  # there and back
    cost = with_terms(cost, terms)
    ran = [sample for sample in samples if sample.kind in ("local", "ring")]
    ran = _bound_by_device(ran) if launches_ahead else ran
    blocks = [sample for sample in samples if sample.kind == "block"]
    local = [each for each in ran if each.kind == "local"]
    if len(local) < _LEAST_LOCAL:
        got, remedy = str(len(local)), "Profile again."
        raise ConfigError("samples", expected="three microbatches of one rank, or more", got=got, remedy=remedy)
    terms |= _fit_microbatches(ran, blocks, cost)
    if not terms["quadratic_seconds"].value + terms["linear_seconds"].value > 0:
        expected, remedy = (
            "microbatches whose time grows with their tokens",
            "Profile again, on a quiet machine.",
        )
        raise ConfigError("samples", expected=expected, got="seconds that do not grow", remedy=remedy)
    cost = with_terms(cost, terms)
    terms |= _fit_forward(local, blocks, cost)
    terms |= {_ENDS[each.kind]: _a_token(each) for each in samples if each.kind in _ENDS}
    terms |= _fit_step_end(samples, cost) | _fit_images(samples, cost)
    cost = with_terms(cost, terms)
    has_images = any(each.kind == "images" for each in samples)
    measurable: list[TermName] = [name for name in get_args(TermName) if name != _OF_TOWERS or has_images]
    errors = [abs(predicted_seconds(each, cost) / each.seconds - 1) for each in ran]
    return Fit(
        terms=terms,
        not_measured=tuple(name for name in measurable if name not in terms),
        block_efficiency=curve,
        ring_efficiency=rings,
        mean_error=float(np.mean(errors)),
        worst_error=float(np.max(errors)),
    )


def _bound_by_device(ran: Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples whose passes take longer than launches; all, if fewer than three local ones are left."""
    timed = [(each, each.forward_seconds, each.seconds - each.forward_seconds) for each in ran if each.forward_seconds]
    if not timed:
        return ran
    least_forward = _ABOVE_LAUNCHES * min(forward for _, forward, _ in timed)
    least_backward = _ABOVE_LAUNCHES * min(backward for _, _, backward in timed)
    short = [each for each, forward, backward in timed if forward <= least_forward or backward <= least_backward]
    left = [each for each in ran if each not in short and each.seconds > least_forward + least_backward]
    return left if sum(each.kind == "local" for each in left) >= _LEAST_LOCAL else ran


def with_curves(cost: Cost, documents: Curve, rings: Curve) -> Cost:
    """Return the costs with measured curves, if there are any; older files have none of rings, which run alike."""
    return replace(cost, block_efficiency=documents, ring_efficiency=rings) if documents else cost


def with_terms(cost: Cost, terms: Mapping[TermName, Term]) -> Cost:
    """Return the costs with these terms in place of their own."""
    values: dict[str, float] = {name: term.value for name, term in terms.items()}

    def some(names: str) -> dict[str, float]:
        return {name: values[name] for name in names.split() if name in values}

    collectives = {"node_bytes_per_second": 0.0} if "near_bytes_per_second" in values else {}
    attention = values.get("forward_attention", cost.forward.attention)
    linear = values.get("forward_linear", cost.forward.linear)
    of_passes = "quadratic_seconds linear_seconds fixed_seconds embedding_seconds head_seconds image_ratio"
    return replace(
        cost,
        **some(f"{of_passes} copy_bytes_per_second"),
        near=_link(cost.near, values.get("near_bytes_per_second"), values.get("near_hop_seconds")),
        far=_link(cost.far, values.get("far_bytes_per_second"), values.get("far_hop_seconds")),
        forward=replace(cost.forward, attention=attention, linear=linear),
        backward=replace(cost.backward, attention=1 - attention, linear=1 - linear),
        ending=replace(cost.ending, **some("update_seconds clear_seconds reduced_bytes_per_second"), **collectives),
    )


def _link(link: Link, rate: float | None, hop: float | None) -> Link:
    return Link(
        bytes_per_second=link.bytes_per_second if rate is None else rate,
        hop_seconds=link.hop_seconds if hop is None else hop,
    )


def predicted_seconds(sample: Sample, cost: Cost) -> float:
    """Return the seconds of a local or ring sample by these costs."""
    nodes = {"ranks_per_node": 1 if sample.tier == "far" else sample.degree, "uplink_bytes_per_second": np.inf}
    placed = replace(cost, **nodes)
    ranks = tuple(range(sample.degree))
    return cost.fixed_seconds + placed.piece_seconds(sample.lengths, sample.degree, Choice(), ranks=ranks)


def _fit_microbatches(ran: Sequence[Sample], blocks: Sequence[Sample], cost: Cost) -> dict[TermName, Term]:
    """Fit microbatches, and ring steps of each tier that was run; the largest block anchors attention."""
    unit = replace(cost, quadratic_seconds=1.0)
    tiers: list[Tier] = [tier for tier in _LINKS if any(each.kind == "ring" and each.tier == tier for each in ran)]
    names: tuple[TermName, ...] = (*ARITHMETIC, *(_HOPS[tier] for tier in tiers))
    columns = np.array([_columns(each, unit, tiers) for each in ran])
    seconds = np.array([each.seconds for each in ran])
    largest = sorted(blocks, key=lambda each: each.lengths)[-1:]
    alone = [[each.lengths[0] ** 2 / cost.layers, *(0.0 for _ in names[1:])] for each in largest]
    rows = np.vstack([columns, np.array(alone).reshape(-1, len(names))])
    took = np.append(seconds, [each.seconds for each in largest])
    solved = least_squares(rows, took)
    for _ in range(_TURNS if len(names) > 3 else 0):
        terms: dict[TermName, Term] = {name: solved.term(column) for column, name in enumerate(ARITHMETIC)}
        terms |= {_HOPS[tier]: Term(value=0.0, relative_error=None) for tier in tiers}
        still = with_terms(cost, terms)
        priced = columns[:, :3] @ solved.values[:3]
        exposed = np.array([predicted_seconds(each, still) for each in ran]) - priced
        known = np.append(np.maximum(0.0, exposed), np.zeros(len(largest)))
        solved = least_squares(rows, took, known=known)
    return {name: solved.term(column) for column, name in enumerate(names)}


def _columns(sample: Sample, unit: Cost, tiers: Sequence[Tier]) -> list[float]:
    """Return the factor of each coefficient: squared tokens, tokens, 1, ring steps of each tier."""
    tokens = np.array(sample.lengths, dtype=np.float64)
    attention = float(unit.attention_seconds(tokens, sample.degree).sum()) / sample.degree
    steps = sum(each.ring > 0 for each in unit.passes("none")) * (sample.degree - 1)
    return [attention, float(tokens.sum()) / sample.degree, 1.0, *(steps * (sample.tier == tier) for tier in tiers)]


def _fit_forward(local: Sequence[Sample], blocks: Sequence[Sample], cost: Cost) -> dict[TermName, Term]:
    """Fit the forward share: of attention by the largest block, of linear work by what is left."""
    timed = [each for each in local if each.forward_seconds is not None]
    if not timed or not blocks:
        return {}
    largest = max(blocks, key=lambda each: each.lengths)
    if largest.forward_seconds is None:
        return {}
    share = _share(largest.forward_seconds / largest.seconds)
    tokens = [np.array(each.lengths, dtype=np.float64) for each in timed]
    attention = np.array([float(cost.attention_seconds(each, 1).sum()) for each in tokens])
    linear = np.array([cost.linear_seconds * float(each.sum()) + cost.fixed_seconds for each in tokens])
    seconds = np.array([float(each.forward_seconds or 0.0) for each in timed])
    solved = least_squares(linear[:, None], seconds, known=share * attention).term(0)
    return {
        "forward_attention": Term(value=share, relative_error=_of_one(largest)),
        "forward_linear": replace(solved, value=_share(solved.value)),
    }


def _share(value: float) -> float:
    return min(_MOST_SHARE, max(_LEAST_SHARE, value))


def _fit_step_end(samples: Sequence[Sample], cost: Cost) -> dict[TermName, Term]:
    """Split the cost of the step's end: bytes, this rank's slice of the update, and work that no rank shares."""
    of_kind = {sample.kind: sample for sample in samples}
    terms: dict[TermName, Term] = {}
    if (moved := of_kind.get("end_collectives")) is not None and moved.degree > 1:
        rate = cost.reduced_bytes * (moved.degree - 1) / moved.degree / moved.seconds
        terms["reduced_bytes_per_second"] = Term(value=rate, relative_error=_of_one(moved))
    if (update := of_kind.get("end_update")) is not None:
        terms["update_seconds"] = Term(value=update.seconds * update.degree, relative_error=_of_one(update))
    if (clear := of_kind.get("end_clear")) is not None:
        terms["clear_seconds"] = Term(value=clear.seconds, relative_error=_of_one(clear))
    return terms


def _fit_images(samples: Sequence[Sample], cost: Cost) -> dict[TermName, Term]:
    """Fit how long a tower takes for its counted work; what a call takes beside it is left out."""
    images = [each for each in samples if each.kind == "images"]
    if len(images) < _LEAST_IMAGES or not cost.linear_seconds:
        return {}
    columns = np.array([[cost.linear_seconds * each.image_work, 1.0] for each in images])
    term = least_squares(columns, np.array([each.seconds for each in images])).term(0)
    return {_OF_TOWERS: term} if term.value > 0 else {}


def _a_token(sample: Sample) -> Term:
    return Term(value=sample.seconds / sum(sample.lengths), relative_error=_of_one(sample))


def _of_one(sample: Sample) -> float | None:
    """Return the relative standard error of one sample, from the spread of its repeats."""
    return sample.spread / sample.repeats**0.5 if sample.repeats > 1 else None


def _rate(moved: Sequence[Sample]) -> Term | None:
    """Fit bytes per second of messages or copies. Return None if they are too few, or take no longer for more bytes."""
    if len({each.num_bytes for each in moved}) < 2:
        return None
    columns = np.array([[1.0, float(each.num_bytes)] for each in moved])
    term = least_squares(columns, np.array([each.seconds for each in moved])).term(1)
    return replace(term, value=1 / term.value) if term.value > 0 else None


def block_curves(samples: Sequence[Sample]) -> tuple[Curve, Curve]:
    """Return the curves of documents and of rings by the speed of the largest document, as `Hardware` needs them."""
    curves: list[Curve] = []
    largest = 0.0
    for kind in ("block", "ring_block"):
        speeds = {each.lengths[0]: each.lengths[0] ** 2 / each.seconds for each in samples if each.kind == kind}
        largest = largest or speeds[max(speeds)] if speeds else 0.0
        share, curve = 1.0, list[tuple[float, float]]()
        for tokens in sorted(speeds, reverse=True):
            share = min(share, speeds[tokens] / largest)
            curve.insert(0, (float(tokens), share if curve else 1.0))
        curves.append(tuple(curve))
    documents, rings = curves
    if rings:  # no faster than a document of twice its tokens, wherever one of the two curves bends
        points = np.unique([*(tokens for tokens, _ in rings), *(tokens / 2 for tokens, _ in documents)])
        shares = np.minimum(speed_shares(rings, points), speed_shares(documents, 2 * points))
        rings = tuple(zip(points.tolist(), shares.tolist(), strict=True))
    return documents, rings


def least_squares(columns: Floats, seconds: Floats, *, known: Floats | float = 0.0) -> _Solved:
    """Fit seconds - known by non-negative coefficients, every row by its relative error.

    There are few columns, so all subsets of them are tried; the best one without a negative coefficient wins.
    """
    scales = 1.0 / seconds
    rows, target = columns * scales[:, None], (seconds - known) * scales
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    best, best_loss = _Solved(np.zeros(columns.shape[1]), np.full(columns.shape[1], np.inf)), float(target @ target)
    for size in range(1, columns.shape[1] + 1):
        for chosen in map(list, combinations(range(columns.shape[1]), size)):
            some = rows[:, chosen] / scale[chosen]
            found, _, rank, _ = np.linalg.lstsq(some, target, rcond=None)
            loss = float(np.square(target - some @ found).sum())
            if rank < size or found.min() < 0 or loss >= best_loss:
                continue
            values, errors = np.zeros(columns.shape[1]), np.full(columns.shape[1], np.inf)
            values[chosen] = found / scale[chosen]
            if len(seconds) > size:
                variance = loss / (len(seconds) - size) * np.diag(np.linalg.inv(some.T @ some))
                errors[chosen] = np.sqrt(np.maximum(0.0, variance)) / scale[chosen]
            best, best_loss = _Solved(values, errors), loss
    return best
