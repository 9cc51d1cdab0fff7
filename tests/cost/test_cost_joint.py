"""Costs that choose: against trying every ratio and every split of heads."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lengthwise.cost import Choice, Choices, Cost, all_terms_cost, named_hardware, named_shape

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
COST = all_terms_cost(replace(SHAPE, kv_heads=32), HARDWARE)
CAPACITY, LAYERS = 8192, 32
LENGTHS = st.integers(1, 300_000)


def _joint(**changes) -> Cost:
    terms, changes = changes.pop("terms", COST), {"offloads_above_tokens": CAPACITY, "layers": LAYERS} | changes
    return terms.choosing(Choices(**changes))


def _ratio(held: float, allowed: int) -> float:
    """Find by halving the least ratio at which a rank holds so many tokens."""
    low, high = 0.0, 1.0
    if held <= allowed:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        fits = held * (2 + (1 - middle) * (LAYERS - 2)) / LAYERS <= allowed
        low, high = (low, middle) if fits else (middle, high)
    return high


@example(length=20_000, degree=2, recompute="none")
@given(length=LENGTHS, degree=st.integers(1, 40), recompute=st.sampled_from(["none", "layer", "all_but_attention"]))
def test_a_piece_pays_for_the_least_ratio_that_holds_it(length: int, degree: int, recompute: str) -> None:
    cost = replace(COST, copy_bytes_per_second=3e9)  # slow enough to show
    joint = _joint(terms=cost, recompute=recompute)
    if length / degree > joint.most_held_tokens(CAPACITY):
        degree = -(-length // joint.most_held_tokens(CAPACITY))
    ratio = _ratio(length / degree, CAPACITY + (degree > 1))
    wanted = cost.piece_seconds([length], degree, Choice(offload=ratio, recompute=recompute))
    assert joint.piece_seconds([length], degree) == pytest.approx(wanted, rel=1e-9)
    (of_ring,) = joint.ring_piece_seconds(np.array([length]), np.array([degree])).tolist()
    assert of_ring == pytest.approx(wanted, rel=1e-9)


@given(lengths=st.lists(LENGTHS, min_size=1, max_size=5), degree=st.sampled_from([1, 3, 6, 8, 12, 16, 32, 64]))
def test_a_ring_takes_the_quickest_split_of_heads(lengths: list[int], degree: int) -> None:
    joint = _joint(splits_heads=True, offloads_above_tokens=np.inf)
    groups = [group for group in range(1, 33) if 32 % group == 0 and degree % group == 0]
    wanted = min(COST.piece_seconds(lengths, degree, Choice(heads=group)) for group in groups)
    assert joint.piece_seconds(lengths, degree) == wanted
    each = [min(COST.piece_seconds([length], degree, Choice(heads=group)) for group in groups) for length in lengths]
    many = joint.ring_piece_seconds(np.array(lengths), np.full(len(lengths), degree))
    assert many.tolist() == pytest.approx(each, rel=1e-12)


def test_ranks_hold_what_the_plan_file_and_the_host_allow() -> None:
    token_bytes = COST.copy_bytes["none"]
    assert _joint().most_held_tokens(CAPACITY) == min(CAPACITY * 16, CAPACITY + int(COST.host_bytes / token_bytes)) - 1
    small = replace(COST, host_bytes=1000.5 * token_bytes)
    assert _joint(terms=small).most_held_tokens(CAPACITY) == CAPACITY + 999
    assert _joint(layers=2).most_held_tokens(CAPACITY) == CAPACITY
    assert _joint().without_copies().most_held_tokens(CAPACITY) == CAPACITY
    recomputed = _joint(terms=small, recompute="layer").most_held_tokens(CAPACITY)
    assert recomputed == CAPACITY + int(1000.5 * token_bytes / COST.copy_bytes["layer"]) - 1


@pytest.mark.parametrize("kind", ["layer", "all_but_attention"])
def test_recomputed_costs_agree_with_what_they_are_made_of(kind: str) -> None:
    priced = COST.recomputing(kind)
    lengths = np.array([1, 700, 50_000])
    alone = [COST.piece_seconds([length], 1, Choice(recompute=kind)) for length in lengths.tolist()]
    assert priced.compute_seconds(lengths) == pytest.approx(alone)
    assert priced.fixed_seconds == pytest.approx(COST.fixed_seconds * 4 / 3)
    again = kind == "layer"
    assert priced.hops_seconds(12) == pytest.approx(COST.hops_seconds(12) * (1 + again / 2))
    assert priced.recomputing("none") is priced is priced.recomputing(kind)


def test_a_faster_rank_offloads_less_for_free() -> None:
    lengths, degrees = np.array([65_536]), np.array([1])
    assert _joint().hides_copies(np.array([15_000]), degrees).tolist() == [False]
    kept = _joint(offloads_above_tokens=40_000)
    assert kept.hides_copies(lengths, degrees).tolist() == [True]
    assert kept.at_speed(3.0).hides_copies(lengths, degrees).tolist() == [False]
    assert kept.at_speed(3.0).compute_seconds(lengths)[0] < kept.compute_seconds(lengths)[0] / 2
