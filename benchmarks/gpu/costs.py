"""How well costs fitted on some microbatches predict others, in seconds and in bytes.

1. Packs are drawn: how many tokens log-uniformly, documents of a published set, half of them one document.
2. All take turns; medians count. Some of them and single blocks are fitted, the others are predicted.
3. The same for bytes: what a run predicts at its start, from small passes of the model, and the formula.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gpu.clock import seconds_of
from gpu.costs_here import hardware_here
from gpu.loops import OurLoop
from gpu.peaks import PredictedBytes, peak_beside
from gpu.records import Records
from gpu.sizes import Sizes
from lengthwise.attention import Block, Saved
from lengthwise.core.measurements import Sample
from lengthwise.cost import LOGITS_AT_ONCE, Cost, shape_from_config
from lengthwise.cost.fit import fit_samples, predicted_seconds, with_terms
from lengthwise.cost.measured import base_cost
from lengthwise.data.recipes import draw_lengths
from lengthwise.engine.batch import random_batch
from lengthwise.profiler.runs import local_run


def costs(sizes: Sizes, records: Records) -> None:
    """Write a row `held-out microbatch` for each, and `costs` with the errors of all."""
    device = sizes.where
    loop = OurLoop(sizes.cost_model, device, sizes.dtype)
    config: Any = loop.model.config
    shape = shape_from_config(config.to_dict(), name=sizes.cost_model)
    packs = draw_packs(sizes.cost_fitted + sizes.cost_held_out, sizes.cost_tokens)
    samples, peaks = _run_packs(sizes, loop, packs)
    fitted = samples[: sizes.cost_fitted] + [_block(sizes, loop, tokens) for tokens in _block_tokens(sizes)]
    base = base_cost(shape, hardware_here(device), precision=sizes.precision)
    fit = fit_samples(fitted, base)
    cost = with_terms(replace(base, block_efficiency=fit.block_efficiency or base.block_efficiency), fit.terms)
    _report(sizes, records, loop, samples[sizes.cost_fitted :], peaks[sizes.cost_fitted :], cost)
    records.add("fit", mean_error=fit.mean_error, worst_error=fit.worst_error, microbatches=sizes.cost_fitted)


def draw_packs(number: int, tokens: tuple[int, int], seed: int = 0) -> list[tuple[int, ...]]:
    """Draw packs of documents; all are different, and short and long ones alternate in both parts."""
    choose, packs = random.Random(seed), list[tuple[int, ...]]()
    least, most = tokens
    while len(packs) < number:
        whole = round(least * (most / least) ** choose.random())
        alone = len(packs) % 2 == 0
        pack = (whole,) if alone else tuple(draw_lengths("github", whole, choose.randrange(1 << 30), max(1, whole)))
        if pack not in packs:
            packs.append(pack)
    return packs


def _run_packs(sizes: Sizes, loop: OurLoop, packs: Sequence[tuple[int, ...]]) -> tuple[list[Sample], list[int]]:
    """Run all packs in turns; return samples, and the bytes of each beside what is kept."""
    config: Any = loop.model.config
    runs = []
    for pack in packs:
        plan = local_run(pack, 1, config.num_hidden_layers).plan
        assert plan is not None, pack
        batch = random_batch(pack, vocab=config.vocab_size)
        runs.append(lambda plan=plan, batch=batch: loop.work(plan, batch))
    took: list[list[float]] = [[] for _ in runs]
    peaks = [0 for _ in runs]
    for turn in range(sizes.cost_repeats + 1):  # the first one warms up, and tells the bytes
        for number, run in enumerate(runs):
            if turn:
                took[number] += seconds_of(run, loop.device, repeats=1, warm_up=0)
            else:
                peaks[number] = peak_beside(loop, run)
            loop.parameters.clear_gradients()
    return [_sample("local", pack, each) for pack, each in zip(packs, took, strict=True)], peaks


def _block_tokens(sizes: Sizes) -> list[int]:
    least, most = sizes.cost_tokens
    return [most >> power for power in range(8) if most >> power >= least]


def _block(sizes: Sizes, loop: OurLoop, tokens: int) -> Sample:
    """Time one layer's attention of one document."""
    config: Any = loop.model.config
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    q, k, v = (torch.randn(tokens, n, config.head_dim, dtype=sizes.dtype, device=loop.device) for n in heads)
    block = Block(q=q, k=k, v=v, scale=config.head_dim**-0.5)

    def run() -> None:
        out, lse = loop.kernel.forward(block)
        loop.kernel.backward(out, block, Saved(out=out, lse=lse))

    took = seconds_of(run, loop.device, repeats=sizes.cost_repeats)
    return _sample("block", (tokens,), took)


def _sample(kind: Any, lengths: tuple[int, ...], took: Sequence[float]) -> Sample:
    median = statistics.median(took)
    return Sample(
        kind=kind,
        lengths=lengths,
        degree=1,
        tier="none",
        num_bytes=0,
        seconds=median,
        forward_seconds=None,
        repeats=len(took),
        spread=(max(took) - min(took)) / median,
    )


def _report(
    sizes: Sizes, records: Records, loop: OurLoop, samples: Sequence[Sample], peaks: Sequence[int], cost: Cost
) -> None:
    predicted = PredictedBytes(loop, logits_at_once=LOGITS_AT_ONCE, most_tokens=sizes.cost_tokens[1])
    errors: dict[str, list[float]] = {"seconds": []}
    for sample, measured in zip(samples, peaks, strict=True):
        tokens, seconds = sum(sample.lengths), predicted_seconds(sample, cost)
        errors["seconds"].append(seconds / sample.seconds - 1)
        row = {"start_bytes": predicted.at_start(tokens), "formula_bytes": predicted.by_formula(tokens)}
        for name, guess in row.items():
            errors.setdefault(name, []).append(guess / measured - 1)
        records.add(
            "held-out microbatch",
            tokens=tokens,
            documents=len(sample.lengths),
            seconds=sample.seconds,
            predicted_seconds=seconds,
            seconds_error=errors["seconds"][-1],
            held_bytes=measured,
            **row,
        )
    for what, each in errors.items():
        absolute = [abs(error) for error in each]
        records.add("costs", of=what, mean_error=statistics.mean(absolute), worst_error=max(absolute), number=len(each))
