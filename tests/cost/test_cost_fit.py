"""Fitting: known coefficients come back from samples, within their stated errors; other work makes no rank slow."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing import make_plan

from cost.measured_samples import SHAPE, base, measurements_of, sample, samples_of
from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import Piece
from lengthwise.cost import Choice, Link
from lengthwise.cost.ending import Ending
from lengthwise.cost.fit import block_curves, fit_samples, with_terms
from lengthwise.cost.hardware import named_hardware
from lengthwise.cost.measured import measured_cost
from lengthwise.cost.passes import parts_by_shares
from lengthwise.cost.rank_speeds import RanStep, rank_speeds
from properties import costliest


def machine(
    quadratic=5e-8, linear=1e-4, fixed=0.01, near=1e9, far=2e8, hop=3e-3, forward=(0.3, 0.35), curve=((32.0, 1.0),)
):
    cost = base()
    attention, share = forward
    return replace(
        cost, quadratic_seconds=quadratic, linear_seconds=linear, fixed_seconds=fixed,
        near=Link(bytes_per_second=near, hop_seconds=hop), far=Link(bytes_per_second=far, hop_seconds=2 * hop),
        forward=replace(cost.forward, attention=attention, linear=share),
        backward=replace(cost.backward, attention=1 - attention, linear=1 - share), block_efficiency=curve,
        copy_bytes_per_second=4e8, image_ratio=1.7,
        ending=Ending(update_seconds=0.02, clear_seconds=1e-3, reduced_bytes_per_second=3e8),
    )  # fmt: skip


REAL = st.floats(min_value=0.2, max_value=5.0)


@costliest
@given(q=REAL, linear=REAL, fixed=REAL, near=REAL, far=REAL, hop=REAL, share=st.floats(0.2, 0.45))
def test_fit_recovers_every_term_from_exact_samples(q, linear, fixed, near, far, hop, share):
    true = machine(5e-8 * q, 1e-4 * linear, 0.01 * fixed, 1e9 * near, 2e8 * far, 3e-3 * hop, (share, 0.35))
    fit = fit_samples(samples_of(true), base())
    values = {name: term.value for name, term in fit.terms.items()}
    assert fit.not_measured == ()
    for name in ("quadratic_seconds", "linear_seconds", "fixed_seconds"):
        assert values[name] == pytest.approx(getattr(true, name), rel=2e-2), name
    exact = {
        "near_bytes_per_second": true.near.bytes_per_second, "far_bytes_per_second": true.far.bytes_per_second,
        "copy_bytes_per_second": 4e8, "forward_attention": share, "update_seconds": 0.02, "clear_seconds": 1e-3,
        "reduced_bytes_per_second": 3e8,
    }  # fmt: skip
    assert {name: values[name] for name in exact} == pytest.approx(exact)
    assert values["image_ratio"] == pytest.approx(1.7, rel=2e-2)
    assert fit.mean_error < 0.02


@costliest
@given(seed=st.integers(0, 10_000), noise=st.floats(0.0, 0.05))
def test_fit_of_noisy_samples_predicts_within_the_noise_and_says_how_sure_it_is(seed, noise):
    true = machine()
    fit = fit_samples(samples_of(true, noise=noise, seed=seed), base())
    fitted = with_terms(replace(base(), block_efficiency=fit.block_efficiency), fit.terms)
    for lengths, degree in (((1500,), 1), ((3000,), 2), ((100,) * 20, 1)):
        priced = [
            cost.fixed_seconds + cost.piece_seconds(lengths, degree, Choice(), ranks=tuple(range(degree)))
            for cost in (fitted, true)
        ]
        assert priced[0] == pytest.approx(priced[1], rel=0.02 + 5 * noise)
    for name, true_value in (("linear_seconds", 1e-4), ("quadratic_seconds", 5e-8)):
        term = fit.terms[name]
        assert term.relative_error is not None
        assert abs(term.value / true_value - 1) < 0.02 + 10 * noise


def test_the_block_curve_is_the_one_that_slowed_the_blocks():
    curve = ((32.0, 0.2), (128.0, 0.5), (512.0, 0.8), (1024.0, 0.9), (2048.0, 0.95), (4096.0, 1.0))
    fit = fit_samples(samples_of(machine(curve=curve)), base())
    assert np.array(fit.block_efficiency) == pytest.approx(np.array(curve))
    replace(named_hardware("cpu"), block_efficiency=fit.block_efficiency)
    assert fit.terms["quadratic_seconds"].value == pytest.approx(5e-8, rel=1e-2)


def test_terms_without_samples_stay_those_of_the_hardware_and_are_named():
    local = [each for each in samples_of(machine()) if each.kind == "local"]
    fit = fit_samples(local, base())
    assert set(fit.terms) == {"quadratic_seconds", "linear_seconds", "fixed_seconds"}
    assert set(fit.not_measured) >= {"near_bytes_per_second", "far_hop_seconds", "update_seconds", "forward_linear"}
    assert fit.block_efficiency == ()
    cost = measured_cost(measurements_of(local))
    assert (cost.near, cost.far, cost.ending) == (base().near, base().far, Ending())


def test_microbatches_that_wait_for_launches_are_left_out_where_the_host_runs_ahead():
    """A pass takes its launches or its work, whichever is longer, as between two waits for a GPU."""
    true, launch = replace(machine(), fixed_seconds=0.0), 0.1
    samples = [each for each in samples_of(true) if each.kind in ("local", "block")]
    for number, each in enumerate(samples):
        if each.kind == "local":
            forward, backward = max(launch, each.forward_seconds), max(launch, each.seconds - each.forward_seconds)
            samples[number] = replace(each, seconds=forward + backward, forward_seconds=forward)
    ahead, all_of_them = (fit_samples(samples, base(), launches_ahead=ahead) for ahead in (True, False))
    for name in ("quadratic_seconds", "linear_seconds"):
        assert ahead.terms[name].value == pytest.approx(getattr(true, name), rel=2e-2)
    assert ahead.terms["fixed_seconds"].value < 0.1 * launch < all_of_them.terms["fixed_seconds"].value
    assert ahead.mean_error < 0.02 < all_of_them.mean_error


def test_fit_refuses_what_tells_nothing():
    true = samples_of(machine())
    with pytest.raises(ConfigError, match="three microbatches"):
        fit_samples([each for each in true if each.kind != "local"], base())
    flat = [sample("local", 0.01, (tokens,)) for tokens in (100, 1000, 10_000)]
    flat += [sample("local", 1e-6, (tokens,)) for tokens in (10**5, 10**6)]
    with pytest.raises(ConfigError, match="seconds that do not grow"):
        fit_samples(flat, base())


def test_the_step_end_is_what_was_measured():
    cost = measured_cost(measurements_of(samples_of(machine())))
    bytes_moved = cost.reduced_bytes
    assert cost.step_end_seconds(1) == pytest.approx(0.02 + 1e-3)
    assert cost.step_end_seconds(4) == pytest.approx(bytes_moved * 3 / 4 / 3e8 + 0.02 / 4 + 1e-3)
    assert base().step_end_seconds(1) == 0
    assert SHAPE.name in cost.version


@pytest.mark.parametrize("tokens", [(64, 128), (32, 64, 128, 256), (128, 1024)])
def test_curves_of_a_noisy_machine_make_a_hardware_description(tokens):
    """Either curve may bend where the other does not."""
    random = np.random.default_rng(0)
    for _ in range(50):
        found = [sample("block", number**2 * random.uniform(0.1, 1), (number,)) for number in (32, 128, 256)]
        found += [sample("ring_block", number**2 * random.uniform(0.1, 1), (number,)) for number in tokens]
        documents, rings = block_curves(found)
        replace(named_hardware("cpu"), block_efficiency=documents, ring_efficiency=rings)


def test_shares_prefixes_and_what_is_computed_again_are_no_slowness():
    true = machine(curve=())

    def is_none_slow(plan, pairs, tokens, launches=1):
        busy = true.quadratic_seconds * np.array(pairs) + true.linear_seconds * np.array(tokens)
        busy = busy + true.fixed_seconds * np.array(launches)
        return rank_speeds(true, [RanStep(plan=plan, busy_seconds=tuple(busy.tolist()))] * 6) is None

    parts, held = parts_by_shares((4000,), 2, (3.0, 1.0))
    shared = make_plan(2, (4000,), [Piece(ranks=(0, 1), sequences=(0,), shares=(3.0, 1.0))])
    assert is_none_slow(shared, 4000**2 * parts, held)
    pieces = [Piece(ranks=(0,), sequences=(0, 1, 2)), Piece(ranks=(1,), sequences=(3,))]
    branches = replace(make_plan(2, (8000, 1000, 1000, 8000), pieces), parents=(None, 0, 0, None))
    assert is_none_slow(branches, [8000**2 + 2 * (9000**2 - 8000**2), 8000**2], [10_000, 8000])
    pieces = [Piece(ranks=(int(number > 0),), sequences=(number,)) for number in range(31)]
    assert is_none_slow(make_plan(2, (2000, *[20] * 30), pieces), [2000**2, 30 * 20**2], [2000, 600], [1, 30])
    once = true.quadratic_seconds * 2000**2 + true.linear_seconds * 2000 + true.fixed_seconds
    for kind in ("layer", "all_but_attention"):
        plan = make_plan(2, (2000, 2000), [Piece(ranks=(0,), sequences=(0,)), Piece(ranks=(1,), sequences=(1,))])
        plan = replace(plan, microbatches=(replace(plan.microbatches[0], recompute=kind), *plan.microbatches[1:]))
        passes = true.passes(kind)
        again = sum(each.attention for each in passes) * true.quadratic_seconds * 2000**2
        again += sum(each.linear for each in passes) * (true.linear_seconds * 2000 + true.fixed_seconds)
        assert rank_speeds(true, [RanStep(plan=plan, busy_seconds=(again, once))] * 6) is None
