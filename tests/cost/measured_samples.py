"""Samples of a machine whose coefficients are known, for tests of the fit and of the file."""

from dataclasses import replace

import numpy as np

from lengthwise.core.measurements import MeasuredPlace, Measurements, Sample
from lengthwise.cost import named_shape
from lengthwise.cost.fit import fit_samples, predicted_seconds
from lengthwise.cost.measured import base_cost

SHAPE = named_shape("tiny")
LENGTHS = (32, 128, 512, 1024, 2048, 4096)
PACKS = ((256,) * 8, (64,) * 32, (700,) * 5, (3000, 500, 500))


def base(ranks_per_node=2):
    return base_cost(SHAPE, "cpu", precision="fp32", ranks_per_node=ranks_per_node)


def sample(kind, seconds, lengths=(), degree=1, tier="none", num_bytes=0, forward=None):
    return Sample(
        kind=kind, lengths=tuple(lengths), degree=degree, tier=tier, num_bytes=num_bytes, seconds=seconds,
        forward_seconds=forward, repeats=5, spread=0.02,
    )  # fmt: skip


def samples_of(cost, *, noise=0.0, seed=0):
    """What a machine of these costs would be timed at, each sample off by about `noise`."""
    rng = np.random.default_rng(seed)

    def noisy(seconds):
        return seconds * float(np.exp(noise * rng.standard_normal()))

    found = []
    for lengths in [*((length,) for length in LENGTHS), *PACKS]:
        tokens = np.array(lengths, dtype=np.float64)
        attention, linear = float(cost.attention_seconds(tokens, 1).sum()), cost.linear_seconds * float(tokens.sum())
        share = cost.forward.attention * attention + cost.forward.linear * (linear + cost.fixed_seconds)
        seconds = attention + linear + cost.fixed_seconds
        found.append(sample("local", noisy(seconds), lengths, forward=noisy(share)))
    for tier in ("near", "far"):
        for length in LENGTHS:
            ring = sample("ring", 1.0, (length,), degree=2, tier=tier)
            found.append(sample("ring", noisy(predicted_seconds(ring, cost)), (length,), degree=2, tier=tier))
        rate = (cost.near if tier == "near" else cost.far).bytes_per_second
        for size in (1 << 14, 1 << 20, 1 << 22):
            found.append(sample("transfer", noisy(1e-4 + size / rate), degree=2, tier=tier, num_bytes=size))
    for length in LENGTHS:
        pairs = cost.attention_seconds(np.array([float(length)]), 1)[0] / cost.layers
        found.append(sample("block", noisy(pairs), (length,), forward=noisy(cost.forward.attention * pairs)))
        below = cost.ring_step_seconds(np.array([2.0 * length]), 2)[1][0] / 4 / cost.layers
        found.append(sample("ring_block", noisy(below), (length,), forward=noisy(cost.forward.attention * below)))
    for size in (1 << 20, 1 << 24):
        found.append(sample("copy", noisy(1e-3 + 2 * size / cost.copy_bytes_per_second), num_bytes=size))
    for kind in ("embedding", "head"):
        found.append(sample(kind, noisy(4096 * (getattr(cost, f"{kind}_seconds") or 1e-6)), (4096,)))
    for work in (20.0, 90.0, 400.0):
        seconds = 1e-3 + cost.image_ratio * cost.linear_seconds * work
        found.append(replace(sample("images", noisy(seconds), (int(work),)), image_work=work))
    ending = cost.ending
    moved = cost.reduced_bytes / 2 / (ending.reduced_bytes_per_second or 1e9)
    found.append(sample("end_collectives", noisy(moved), degree=2))
    found.append(sample("end_update", noisy(ending.update_seconds / 2 or 1e-3), degree=2))
    found.append(sample("end_clear", noisy(ending.clear_seconds or 1e-4), degree=2))
    return found


def measurements_of(samples, threads=1):
    """A file's content with these samples and their fit."""
    return Measurements(
        date="2026-11-22T11:00:00+00:00",
        place=MeasuredPlace(
            device="cpu", processor="a processor", cores=2, threads=threads, ranks=2, ranks_per_node=2, clock="wall",
            versions={"torch": "2.13.0"},
        ),
        model=SHAPE,
        precision="fp32",
        hardware="cpu",
        fit=fit_samples(samples, base()),
        samples=tuple(samples),
    )  # fmt: skip
