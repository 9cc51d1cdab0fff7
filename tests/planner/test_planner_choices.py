"""Degrees under choices, and the passes that write choices into a plan: against trying all."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Choices, Cost, all_terms_cost, named_hardware, named_shape
from lengthwise.planner.problem.degrees import (
    DegreeTable,
    cheapest_degrees,
    fewest_degrees,
    hidden_degrees,
    most_degrees,
    useful_degrees,
)
from lengthwise.planner.problem.finish import write_offload
from lengthwise.program import check_plan, ring_order
from properties import costly

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
SLOW = all_terms_cost(SHAPE, replace(HARDWARE, link_bytes_per_second=3e9))
CLUSTER = Cluster(ranks=60, capacity_tokens=8192)
LENGTHS = st.lists(st.integers(1, 60 * 8192), min_size=1, max_size=6)


def _joint(**changes) -> Cost:
    terms, changes = changes.pop("terms", SLOW), {"offloads_above_tokens": 8192, "layers": 32} | changes
    return terms.choosing(Choices(**changes))


COSTS = [_joint(), _joint(splits_heads=True), _joint(splits_heads=True, offloads_above_tokens=np.inf)]


def _taken(cost: Cost, length: int, degree: int) -> float:
    return degree * (cost.piece_seconds([length], degree) + cost.fixed_seconds)


@costly
@given(lengths=LENGTHS, cost=st.sampled_from(COSTS))
def test_cheapest_degrees_are_found_by_trying_all(lengths: list[int], cost: Cost) -> None:
    many = np.array(lengths)
    fewest = fewest_degrees(cost, many, CLUSTER).tolist()
    for length, least, found in zip(lengths, fewest, cheapest_degrees(cost, many, CLUSTER).tolist(), strict=True):
        tried = [_taken(cost, length, degree) for degree in range(least, CLUSTER.ranks + 1)]
        if length > CLUSTER.capacity_tokens:
            assert _taken(cost, length, found) == pytest.approx(min(tried), rel=1e-9)
        else:
            assert found == 1


def test_cheapest_degrees_above_64_are_exact() -> None:
    """The grid steps by two and four there, and what is between is looked at."""
    cluster, lengths = Cluster(ranks=400, capacity_tokens=512), np.arange(80_000, 200_000, 5003)
    links = {"link_bytes_per_second": 1e12, "node_uplink_bytes_per_second": 8e12, "hop_latency_seconds": 1e-8}
    quick = replace(HARDWARE, **links, block_efficiency=((1, 1.0),))
    terms = all_terms_cost(SHAPE, quick)
    terms = replace(terms, quadratic_seconds=0.0)  # nothing hides copies but linear work
    cost = _joint(terms=terms, offloads_above_tokens=512)
    found = cheapest_degrees(cost, lengths, cluster)
    assert np.any((found > 128) & (found % 2 == 1))
    for length, least, best in zip(
        lengths.tolist(), fewest_degrees(cost, lengths, cluster).tolist(), found.tolist(), strict=True
    ):
        tried = [_taken(cost, length, degree) for degree in range(least, cluster.ranks + 1)]
        assert _taken(cost, length, best) == pytest.approx(min(tried), rel=1e-12)


@costly
@given(lengths=LENGTHS, cost=st.sampled_from(COSTS), share=st.floats(0.02, 1.2))
def test_degrees_within_a_limit_are_the_cheapest(lengths: list[int], cost: Cost, share: float) -> None:
    many = np.array(lengths)
    least, most = cheapest_degrees(cost, many, CLUSTER), np.full(len(lengths), CLUSTER.ranks)
    seconds = share * cost.piece_seconds([max(lengths)], int(least[np.argmax(many)])) + cost.fixed_seconds
    for length, first, found in zip(
        lengths, least.tolist(), DegreeTable(cost, many, least, most).within(seconds).tolist(), strict=True
    ):
        within = [
            degree
            for degree in range(first, CLUSTER.ranks + 1)
            if cost.piece_seconds([length], degree) + cost.fixed_seconds <= seconds * (1 + 1e-12)
        ]
        if not within:
            assert found == CLUSTER.ranks + 1
        elif found != first:
            assert _taken(cost, length, found) == pytest.approx(
                min(_taken(cost, length, degree) for degree in within), rel=1e-9
            )
        assert found > CLUSTER.ranks or found in within


@given(lengths=LENGTHS)
def test_hidden_degrees_are_the_fewest_with_copies_that_hide(lengths: list[int]) -> None:
    cost, many = _joint(terms=replace(SLOW, copy_bytes_per_second=8e9)), np.array(lengths)
    fewest = fewest_degrees(cost, many, CLUSTER).tolist()
    for length, least, found in zip(lengths, fewest, hidden_degrees(cost, many, CLUSTER).tolist(), strict=True):
        free = [d for d in range(least, 61) if cost.hides_copies(np.array([length]), np.array([d]))[0]]
        assert found == free[0]
        without = cost.without_copies().piece_seconds([length], found)
        assert cost.piece_seconds([length], found) == pytest.approx(without)


def test_long_sequences_take_fewer_ranks_with_free_offload() -> None:
    lengths = np.array([8000, 40_000, 250_000])
    cluster = Cluster(ranks=64, capacity_tokens=8192)
    assert hidden_degrees(SLOW, lengths, cluster).tolist() == [1, 5, 31]
    hidden = hidden_degrees(_joint(), lengths, cluster)
    assert hidden[0] == 1
    assert hidden[1] < 5
    assert hidden[2] < 10


def test_useful_degrees_fill_nodes() -> None:
    assert useful_degrees(_joint(), 24) is None
    only = useful_degrees(COSTS[1], 28)
    assert only is not None
    assert only.tolist() == [1, 2, 4, 8, 16, 24, 28]
    assert most_degrees(np.array([3, 9, 27, 27]), np.array([1, 1, 1, 26]), 28, 1, only=only).tolist() == [2, 8, 24, 26]
    lengths = np.array([30_000, 190_000])
    least = cheapest_degrees(COSTS[1], lengths, Cluster(ranks=28, capacity_tokens=8192), only=only)
    grown = DegreeTable(COSTS[1], lengths, least, np.array([28, 28]), only=only).grown(0.5)
    assert set(grown.tolist()) | set(least.tolist()) <= set(only.tolist())


@given(first=st.integers(0, 40), groups=st.integers(1, 40), heads=st.sampled_from([1, 2, 4, 8, 16]))
def test_rings_of_groups_visit_neighbours_group_by_group(first: int, groups: int, heads: int) -> None:
    ring = ring_order(first, groups * heads, heads)
    assert sorted(ring) == list(range(first, first + groups * heads))
    chunks = [ring[place : place + heads] for place in range(0, len(ring), heads)]
    assert all(list(chunk) == list(range(chunk[0], chunk[0] + heads)) for chunk in chunks)
    starts = [chunk[0] for chunk in chunks]
    assert all(abs(a - b) <= 2 * heads for a, b in zip(starts, (*starts[1:], starts[0]), strict=True))


def test_groups_of_heads_stay_in_their_node_where_they_can() -> None:
    assert ring_order(8, 12, 2) == (8, 9, 12, 13, 16, 17, 18, 19, 14, 15, 10, 11)
    for heads in (2, 4, 8):
        ring = ring_order(16, 32, heads)
        assert all(ring[i] // 8 == ring[i - i % heads] // 8 for i in range(32))


@given(
    lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=5),
    degree=st.integers(1, 6),
    capacity=st.integers(7, 900),
    layers=st.sampled_from([3, 4, 32]),
)
def test_written_ratios_are_the_least_that_pass_the_check(lengths, degree, capacity, layers) -> None:
    most = degree * capacity * layers // 2 - 2 * degree
    lengths = [length for number, length in enumerate(lengths) if sum(lengths[: number + 1]) <= most]
    if not lengths:
        return
    piece = Piece(ranks=ring_order(0, degree), sequences=tuple(range(len(lengths))))
    plan = Plan(
        ranks=8, layers=layers, capacity=capacity, tokens=tuple(lengths), microbatches=(Microbatch(pieces=(piece,)),)
    )
    written = write_offload(plan)
    check_plan(written)
    (microbatch,) = written.microbatches
    if microbatch.offload > 1e-5:
        with pytest.raises(Exception, match="tokens held"):
            check_plan(replace(plan, microbatches=(replace(microbatch, offload=microbatch.offload - 1e-5),)))
