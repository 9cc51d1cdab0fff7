"""The cost of a piece, term by term: by hand, against itself, against trying all choices, and as published."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import ConfigError, PlanError
from lengthwise.core.plan import RECOMPUTE_KINDS, Microbatch, Piece
from lengthwise.cost import (
    Choice,
    Choices,
    Cost,
    Link,
    PassShares,
    Tree,
    all_terms_cost,
    analytic_cost,
    lengths_of,
    named_hardware,
    named_shape,
    plain_cost,
)
from lengthwise.cost.passes import ELEMENTWISE
from lengthwise.program import ring_order
from lengthwise.simulator import microbatch_clocks

LLAMA_7B, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
H100 = all_terms_cost(LLAMA_7B, HARDWARE)
NOTHING = PassShares(attention=0.0, linear=0.0, ring=0.0, exchange=0.0)


def full_cost(*, ring_seconds: float = 0.0, hop_seconds: float = 0.0, **coefficients: float) -> Cost:
    """Make costs of one pass and one link of a byte a second, with heads, copies and layers beside it."""
    link = Link(bytes_per_second=1.0, hop_seconds=hop_seconds)
    return Cost(
        **coefficients, forward=PassShares(attention=1.0, linear=1.0, ring=1.0, exchange=1.0), backward=NOTHING,
        near=link, far=link, ranks_per_node=4, ring_bytes=ring_seconds, exchange_bytes=3.0, heads=24, kv_heads=4,
        layers=10, copy_bytes=dict.fromkeys(RECOMPUTE_KINDS, 1.0), copy_bytes_per_second=1.0, reduced_bytes=1.0,
        stages=1,
    )  # fmt: skip


@given(
    lengths=st.lists(st.integers(1, 10**7), min_size=1, max_size=10),
    degree=st.integers(1, 12288),
    values=st.lists(st.floats(0, 1e6), min_size=5, max_size=5),
    windows=st.sampled_from([(), ((1000, 0.5),)]),
)
def test_coefficients_are_the_formula_of_cost_files(lengths, degree, values, windows) -> None:
    quadratic, linear, fixed, ring, hop = values[0], 1.0 + values[1], *values[2:]
    given = dict(zip(COEFFICIENTS, (quadratic, linear, fixed, ring, hop), strict=True))
    cost, many = plain_cost(**given, windows=windows), np.array(lengths)
    attention, tokens = quadratic * cost.seen_pairs(many.astype(float)), many.astype(float)

    def seconds(attention: float, tokens: float, degree: int) -> float:
        exposed = max(0.0, ring * tokens * (degree - 1) - attention) if degree > 1 else 0.0
        return (attention + linear * tokens + exposed) / degree + hop * (degree - 1)

    whole = seconds(attention.sum(), tokens.sum(), degree)
    assert cost.piece_seconds(lengths, degree) == pytest.approx(whole, rel=1e-9)
    for each, places in ((cost.compute_seconds(many), 1), (cost.ring_piece_seconds(many, many * 0 + degree), degree)):
        alone = [seconds(*one, places) for one in zip(attention, tokens, strict=True)]
        assert each == pytest.approx(alone, rel=1e-9)
    assert cost.hops_seconds(degree) == pytest.approx(hop * (degree - 1))
    assert cost.fixed_seconds == fixed


@given(
    length=st.integers(1, 3 * 10**6),
    degree=st.sampled_from([1, 2, 3, 5, 7, 8, 9, 16, 24, 97, 1024]),
    heads=st.sampled_from([1, 2, 4, 8]),
    offload=st.sampled_from([0.0, 0.3, 1.0]),
    recompute=st.sampled_from(RECOMPUTE_KINDS),
)
def test_a_longer_sequence_takes_longer(length, degree, heads, offload, recompute) -> None:
    heads = heads if degree % heads == 0 else 1
    extra = Choice(heads=heads, offload=offload, recompute=recompute)
    shorter, longer = (H100.piece_seconds([n], degree, extra) for n in (length, length + 1))
    assert shorter <= longer
    assert longer <= shorter * (1 + 3 / length)  # and by no jump
    many = H100.ring_piece_seconds(np.array([length]), np.array([degree]))
    assert many[0] == pytest.approx(H100.piece_seconds([length], degree), rel=1e-12)


def test_backward_exposes_transfers_that_both_passes_together_would_hide() -> None:
    cost = replace(
        full_cost(quadratic_seconds=1.0, ring_seconds=100.0),
        forward=PassShares(attention=0.5, linear=0.5, ring=0.25, exchange=0.5),
        backward=PassShares(attention=0.5, linear=0.5, ring=0.75, exchange=0.5),
    )
    attention, transfers = 60 * 60 / 2, 100 * 60 / 2  # over 2 ranks
    assert transfers > attention
    exposed = (0.75 * transfers - attention / 2) + max(0.0, 0.25 * transfers - attention / 2)
    assert exposed > transfers - attention  # forward has attention to spare, which hides nothing of backward
    assert cost.piece_seconds([60], 2) == pytest.approx(attention + exposed)


def test_a_ring_inside_a_node_takes_the_near_link() -> None:
    cost = replace(
        full_cost(linear_seconds=1.0, ring_seconds=8.0, hop_seconds=1.0),
        near=Link(bytes_per_second=4.0, hop_seconds=0.5),
    )
    inside = 100 / 4 + 8 / 4 * 100 * 3 / 4 + 0.5 * 3
    across = 100 / 4 + 8 * 100 * 3 / 4 + 1.0 * 3
    assert cost.piece_seconds([100], 4) == inside
    assert cost.piece_seconds([100], 4, ranks=(4, 6, 7, 5)) == inside
    assert cost.piece_seconds([100], 4, ranks=(2, 4, 5, 3)) == across
    assert cost.piece_seconds([100], 5) == 100 / 5 + 8 * 100 * 4 / 5 + 4.0
    assert cost.hops_seconds(4) == 1.5
    assert cost.hops_seconds(5) == 4.0


def test_split_heads_shorten_the_ring_and_pay_an_exchange() -> None:
    cost = full_cost(quadratic_seconds=1.0, linear_seconds=1.0, ring_seconds=1000.0, hop_seconds=7.0)
    plain = 100 * 100 / 4 + 100 / 4
    ring = 1000.0 * 100 * (2 - 1) / 4
    exchange = 3.0 * 100 / 4 * (2 - 1) / 2
    assert cost.piece_seconds([100], 4, Choice(heads=2)) == plain + (ring - 100 * 100 / 4) + 7.0 + exchange
    assert cost.piece_seconds([100], 4, Choice(heads=4)) == plain + 3.0 * 100 / 4 * 3 / 4
    # 8 ranks a group and 4 KV heads: each KV head is on two ranks, so twice the bytes go round.
    repeated = 1000.0 * 2 * 100 * (2 - 1) / 16
    wide = (100 * 100 + 100) / 16 + max(0.0, repeated - 100 * 100 / 16) + 7.0 + 3.0 * 100 / 16 * 7 / 8
    assert cost.piece_seconds([100], 16, Choice(heads=8)) == pytest.approx(wide)


def test_small_blocks_run_slower() -> None:
    simple = full_cost(quadratic_seconds=1.0)
    cost = replace(simple, block_efficiency=((10, 0.5), (20, 1.0)))
    assert cost.piece_seconds([20], 1) == 400
    assert cost.piece_seconds([10], 1) == 100 / 0.5
    assert cost.piece_seconds([15], 1) == 225 / 0.75
    assert cost.piece_seconds([5], 1) == 25 / 0.25  # below the curve speed falls with the tokens
    assert cost.piece_seconds([40], 4) == 1600 / 4 / 0.5  # blocks of 10
    assert cost.piece_seconds([40], 4, Choice(heads=2)) == pytest.approx(1600 / 4 + 3.0 * 10 / 2)  # blocks of 20


def test_offload_costs_what_compute_does_not_hide() -> None:
    cost = replace(
        full_cost(linear_seconds=3.0),
        forward=PassShares(attention=0.5, linear=1 / 3, ring=0.5, exchange=0.5),
        backward=PassShares(attention=0.5, linear=2 / 3, ring=0.5, exchange=0.5),
        copy_bytes={"none": 2.5, "layer": 1.0, "all_but_attention": 1.0},
    )
    copied = 0.5 * 8 / 10 * 2.5 * 100  # ratio, all layers but two, bytes, tokens
    assert copied == 100 == 3.0 * 100 / 3  # as long as forward
    assert cost.piece_seconds([100], 1, Choice(offload=0.5)) == pytest.approx(300)
    assert cost.piece_seconds([100], 1, Choice(offload=0.75)) == pytest.approx(300 + 50)  # backward hides all
    assert cost.piece_seconds([100], 1, Choice(offload=1.0)) == pytest.approx(300 + 100)
    wider = replace(cost, copy_bytes={**cost.copy_bytes, "layer": 5.0})
    assert wider.piece_seconds([100], 1, Choice(offload=1.0, recompute="layer")) == pytest.approx(400 + 300 + 100)
    assert cost.free_offload(np.array([100]), np.array([1])).tolist() == pytest.approx([0.5])


def test_recomputation_runs_the_ring_again_only_with_attention() -> None:
    cost = replace(
        full_cost(linear_seconds=3.0, ring_seconds=10.0, hop_seconds=1.0),
        forward=PassShares(attention=0.5, linear=1 / 3, ring=0.25, exchange=0.5),
        backward=PassShares(attention=0.5, linear=2 / 3, ring=0.75, exchange=0.5),
    )
    linear, transfers, hop = 3.0 * 100 / 2, 10.0 * 100 / 2, 1.0
    assert cost.piece_seconds([100], 2) == pytest.approx(linear + transfers + 2 * hop)
    partly = cost.piece_seconds([100], 2, Choice(recompute="all_but_attention"))
    assert partly == pytest.approx(linear * 4 / 3 + transfers + 2 * hop)
    norms = cost.piece_seconds([100], 2, Choice(recompute="elementwise"))
    assert norms == pytest.approx(linear * (1 + ELEMENTWISE / 3) + transfers + 2 * hop)
    wholly = cost.piece_seconds([100], 2, Choice(recompute="layer"))
    assert wholly == pytest.approx(linear * 4 / 3 + transfers * 1.25 + 3 * hop)


def test_unequal_shares_wait_for_the_slowest_rank() -> None:
    cost = full_cost(quadratic_seconds=1.0, linear_seconds=1.0)
    equal = cost.piece_seconds([100], 2, shares=(1.0, 1.0))
    assert equal == pytest.approx(cost.piece_seconds([100], 2))
    # shares 1 : 3, chunks of 12, 38, 37 and 13 tokens: position 1 holds tokens 12 to 87.
    assert cost.piece_seconds([100], 2, shares=(1.0, 3.0)) == pytest.approx(87**2 - 12**2 + 75)


def test_step_end_uses_all_links_of_a_node() -> None:
    cost = replace(
        full_cost(linear_seconds=1.0),
        near=Link(bytes_per_second=8.0),
        far=Link(bytes_per_second=1.0),
        reduced_bytes=64.0,
    )
    assert cost.step_end_seconds(1) == 0
    assert cost.step_end_seconds(4) == 64 * 3 / 4 / 8
    assert cost.step_end_seconds(8) == 64 * 7 / 8 / 4  # four links of 1 a node
    narrow = replace(cost, uplink_bytes_per_second=0.5)
    assert [narrow.step_end_seconds(ranks) for ranks in (4, 8)] == [cost.step_end_seconds(4), 64 * 7 / 8 / 0.5]


COEFFICIENTS = ("quadratic_seconds", "linear_seconds", "fixed_seconds", "ring_seconds", "hop_seconds")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        *((partial(plain_cost, **{name: -1.0}), name) for name in COEFFICIENTS),
        *((partial(plain_cost, linear_seconds=value), "linear_seconds") for value in (math.nan, math.inf, True, "1")),
        (partial(plain_cost, linear_seconds=0.0), "at least one coefficient above 0"),
        *(
            (partial(plain_cost, linear_seconds=1.0, windows=each), "windows")
            for each in (((0, 0.5),), ((4, -0.1),), ((4, 0.7), (8, 0.7)))
        ),
        (partial(replace, H100, ranks_per_node=0), "cost"),
        (partial(replace, H100, far=Link(bytes_per_second=0.0)), "cost"),
        (partial(replace, H100, uplink_bytes_per_second=0.0), "uplink"),
        (partial(H100.piece_seconds, [100], 4, Choice(heads=3)), "heads"),
        (partial(H100.piece_seconds, [100], 48, Choice(heads=48)), "heads"),
        *((partial(all_terms_cost, LLAMA_7B, named_hardware("h100"), stages=each), "stages") for each in (0, 33)),
        (partial(named_hardware("h100").with_kernel, "flash33"), "Did you mean `flash3`"),
        (partial(named_hardware("cpu").with_kernel, "flash2"), "kernel"),
    ],
)
def test_costs_refuse_what_cannot_be(make, said):
    with pytest.raises((ConfigError, PlanError), match=said):
        make()


@pytest.mark.parametrize("window", [1, 7, 100])
def test_windowed_layers_count_the_pairs_they_see(window):
    cost = Cost(quadratic_seconds=1.0, windows=((window, 0.25),))
    for length in (1, 2, 7, 8, 50):
        seen = sum(min(query + 1, window) for query in range(length))
        everything = length * (length + 1) / 2
        # s^2 stands for twice the pairs, the diagonal counted half; so does s^2 - (s - w)^2 = 2 s w - w^2.
        windowed = 2 * seen - min(length, window)
        expected = 0.75 * (2 * everything - length) + 0.25 * windowed
        assert cost.piece_seconds([length], 1) == pytest.approx(expected)
        assert cost.compute_seconds(np.array([length]))[0] == pytest.approx(expected)
        assert cost.ring_piece_seconds(np.array([length]), np.array([1]))[0] == pytest.approx(expected)


def test_analytic_cost_counts_flops_and_bytes() -> None:
    cost = analytic_cost(LLAMA_7B, named_hardware("h100"))
    matrices = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 11008) + 4096 * 32000
    assert cost.linear_seconds == pytest.approx(6 * matrices / (989e12 * 0.42))
    assert cost.quadratic_seconds == pytest.approx(7 * 32 * 32 * 128 / (989e12 * 0.528))
    forward = 2 * 2 * 8 * 128 * 32  # K and V in bf16
    passed = 4 * forward  # backward is 3 x: K, V again and fp32 dK, dV
    assert cost.ring_bytes / cost.far.bytes_per_second == pytest.approx(passed / 50e9)


def test_paper_gpu_gives_the_published_layer_times() -> None:
    cost = all_terms_cost(LLAMA_7B, named_hardware("bytescale-gpu"))
    for tokens, milliseconds in ((4096, 0.8 + 0.9), (32_768, 14.1 + 7.5), (131_072, 175.5 + 28.2)):
        head = 2 * 4096 * 32000 / (1.2575e15 * 0.8123) * tokens  # the output head is in our linear work
        attention = cost.compute_seconds(np.array([tokens]))[0] - cost.linear_seconds * tokens
        layer = (attention / 3.5 + (cost.linear_seconds * tokens + cost.fixed_seconds) / 3 - head) / 32
        assert 1e3 * layer == pytest.approx(milliseconds, rel=0.03)


@given(adapters=st.integers(0, 10**8), tokens=st.integers(1, 10**5), degree=st.integers(1, 64))
def test_a_base_under_adapters_makes_no_gradients_of_its_weights(adapters: int, tokens: int, degree: int) -> None:
    whole, few = all_terms_cost(LLAMA_7B, HARDWARE), all_terms_cost(LLAMA_7B, HARDWARE, adapters=adapters)
    added, third = adapters / LLAMA_7B.linear_params, whole.linear_seconds / 3
    assert few.linear_seconds * few.forward.linear == pytest.approx(third * (1 + added))
    assert few.linear_seconds * few.backward.linear == pytest.approx(third * (1 + 2 * added))
    assert few.quadratic_seconds == whole.quadratic_seconds
    assert few.reduced_bytes == pytest.approx(whole.reduced_bytes * adapters / LLAMA_7B.total_params)
    if adapters < LLAMA_7B.linear_params / 4:
        assert few.piece_seconds([tokens], degree) <= whole.piece_seconds([tokens], degree)
    assert few.version != whole.version


@pytest.mark.parametrize("kind", ["none", "layer"])
def test_sweeps_of_states_hide_behind_nothing_and_are_not_made_again(kind: str) -> None:
    """A cut of Qwen3.5-9B: rounds of a map of 4 MiB a sequence and layer in both passes, scans half as long again."""
    cost = all_terms_cost(named_shape("Qwen/Qwen3.5-9B"), named_hardware("h100"))
    bare = replace(cost, cut_seconds=0.0, sweep_bytes=0.0, sweep_messages=0.0)
    assert cost.sweep_bytes == 2 * 24 * (4 << 20)
    lengths, linear = [51_200, 12_800, 1_536], sum(each.linear for each in cost.passes(kind))
    for degree, far_rounds in ((1, 0), (8, 0), (32, 6)):
        links = [cost.near] * (degree - 1 - far_rounds) + [cost.far] * far_rounds
        rounds = sum(2 * 24 / 8 * each.hop_seconds + 3 * cost.sweep_bytes / each.bytes_per_second for each in links)
        scans = linear * cost.cut_seconds * 65_536 / degree * (degree > 1)
        piece = Piece(ranks=ring_order(0, degree), sequences=(0, 1, 2))
        with_states, without = (
            each.recomputing(kind).piece_seconds(lengths, degree, Choice(recompute=kind), ranks=piece.ranks)
            for each in (cost, bare)
        )
        assert with_states - without == pytest.approx(rounds + scans)
        ran = [
            microbatch_clocks(Microbatch(pieces=(piece,), recompute=kind), lengths, each).total.max()
            for each in (cost, bare)
        ]
        assert ran[0] - ran[1] == pytest.approx(rounds + scans, rel=1e-6)


JOINT = all_terms_cost(replace(LLAMA_7B, kv_heads=32), HARDWARE)
CAPACITY, LAYERS = 8192, 32


def choosing(**changes) -> Cost:
    terms, changes = changes.pop("terms", JOINT), {"offloads_above_tokens": CAPACITY, "layers": LAYERS} | changes
    return terms.choosing(Choices(**changes))


def test_ranks_hold_what_the_plan_file_and_the_host_allow() -> None:
    token_bytes = JOINT.copy_bytes["none"]
    most = min(CAPACITY * 16, CAPACITY + int(JOINT.host_bytes / token_bytes)) - 1
    assert choosing().most_held_tokens(CAPACITY) == most
    small = replace(JOINT, host_bytes=1000.5 * token_bytes)
    assert choosing(terms=small).most_held_tokens(CAPACITY) == CAPACITY + 999
    assert choosing(layers=2).most_held_tokens(CAPACITY) == CAPACITY
    assert choosing().without_copies().most_held_tokens(CAPACITY) == CAPACITY
    recomputed = choosing(terms=small, recompute="layer").most_held_tokens(CAPACITY)
    assert recomputed == CAPACITY + int(1000.5 * token_bytes / JOINT.copy_bytes["layer"]) - 1


def test_a_long_completion_keeps_the_speed_of_its_own_block() -> None:
    """Beside a short prompt and short completions: cuDNN runs blocks from 32K on much faster."""
    cost = Cost(quadratic_seconds=1e-6, block_efficiency=((1000, 0.5), (32000, 0.6), (33000, 1.0)))
    spans = ((0, 1000), (1000, 65000), (1000, 5000), (1000, 5000))
    (length,), priced = lengths_of([Tree((0, 1, 2, 3), spans)], cost)
    whole = cost.attention_seconds(np.array([65000.0, 5000.0, 5000.0]), 1).sum()
    assert 1 < priced.attention_seconds(np.array([float(length)]), 1)[0] / whole < 1.05


def test_a_prefix_in_a_prefix_is_a_block_of_its_own() -> None:
    """1,000 tokens, which 600 continue, which two of 200 continue, and one of 200; a smaller tree is beside it."""
    cost = Cost(quadratic_seconds=1e-6, block_efficiency=((100, 0.1), (1000, 1.0)))
    spans = ((0, 1000), (1000, 1600), (1600, 1800), (1600, 1800), (1000, 1200))
    trees = [Tree((0, 1, 2, 3, 4), spans), Tree((5, 6), ((0, 1000), (1000, 1600)))]
    lengths, priced = lengths_of(trees, cost)
    assert lengths == (2200, 1600)
    own = {1000: 1000**2, 600: 600**2, 200: 3 * 200**2}
    between = {1000: 2 * 1000 * (600 + 200), 800: 2 * 1600 * 2 * 200}  # 1,600 tokens in two blocks
    means = [sum(block * each for block, each in of.items()) / sum(of.values()) for of in (own, between)]
    seconds = sum(sum(of.values()) * 1e-6 / (mean / 1000) for of, mean in zip((own, between), means, strict=True))
    assert priced.attention_seconds(np.array([2200.0]), 1) == pytest.approx([seconds])
