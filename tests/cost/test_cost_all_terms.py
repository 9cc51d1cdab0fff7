"""Costs with all terms from shapes and hardware: published figures, adapters, stages."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.plan import RECOMPUTE_KINDS, Microbatch, Piece
from lengthwise.cost import Choice, all_terms_cost, named_hardware, named_shape
from lengthwise.program import ring_order
from lengthwise.simulator import microbatch_clocks

LLAMA_7B, H100 = named_shape("llama-7b"), named_hardware("h100")
PUBLISHED_MS = {4: (0.8, 0.9), 32: (14.1, 7.5), 128: (175.5, 28.2)}


@pytest.mark.parametrize("k_tokens", PUBLISHED_MS)
def test_paper_gpu_gives_the_published_layer_times(k_tokens: int) -> None:
    cost = all_terms_cost(LLAMA_7B, named_hardware("bytescale-gpu"))
    head = 2 * 4096 * 32000 / (1.2575e15 * 0.8123) * 1024 * k_tokens  # the output head is in our linear work
    forward = cost.compute_seconds(np.array([1024 * k_tokens]))[0]
    tokens = 1024 * k_tokens
    attention = forward - cost.linear_seconds * tokens
    layer = (attention / 3.5 + (cost.linear_seconds * tokens + cost.fixed_seconds) / 3 - head) / 32
    assert 1e3 * layer == pytest.approx(sum(PUBLISHED_MS[k_tokens]), rel=0.03)


@given(adapters=st.integers(0, 10**8), tokens=st.integers(1, 10**5), degree=st.integers(1, 64))
def test_a_base_under_adapters_makes_no_gradients_of_its_weights(adapters: int, tokens: int, degree: int) -> None:
    whole, few = all_terms_cost(LLAMA_7B, H100), all_terms_cost(LLAMA_7B, H100, adapters=adapters)
    added, third = adapters / LLAMA_7B.linear_params, whole.linear_seconds / 3
    assert few.linear_seconds * few.forward.linear == pytest.approx(third * (1 + added))
    assert few.linear_seconds * few.backward.linear == pytest.approx(third * (1 + 2 * added))
    assert few.quadratic_seconds == whole.quadratic_seconds
    assert few.reduced_bytes == pytest.approx(whole.reduced_bytes * adapters / LLAMA_7B.total_params)
    if adapters < LLAMA_7B.linear_params / 4:
        assert few.piece_seconds([tokens], degree) <= whole.piece_seconds([tokens], degree)
    assert few.version != whole.version


def test_stages_hold_their_share_of_the_layers() -> None:
    one, two, four = (all_terms_cost(LLAMA_7B, H100, stages=stages) for stages in (1, 2, 4))
    assert four.piece_seconds([10_000], 1) == pytest.approx(one.piece_seconds([10_000], 1) / 4)
    assert four.piece_seconds([10_000], 16) == pytest.approx(two.piece_seconds([10_000], 16) / 2)
    assert (four.stages, four.layers) == (4, 8)
    assert four.version != one.version


@pytest.mark.parametrize("kind", RECOMPUTE_KINDS)
def test_sweeps_of_states_hide_behind_nothing_and_are_not_made_again(kind: str) -> None:
    """A cut of Qwen3.5-9B: rounds of a map of 4 MiB a sequence and layer in both passes, scans half as long again."""
    cost = all_terms_cost(named_shape("Qwen/Qwen3.5-9B"), named_hardware("h100"))
    bare = replace(cost, cut_seconds=0.0, sweep_bytes=0.0, sweep_messages=0.0)
    assert cost.sweep_bytes == 2 * 24 * (4 << 20)
    lengths, linear = [51_200, 12_800, 1_536], sum(each.linear for each in cost.passes(kind))
    for degree, far_rounds in ((1, 0), (2, 0), (8, 0), (32, 6)):
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


def test_sweeps_between_nodes_are_no_faster_than_the_uplink_and_one_rank_has_none() -> None:
    cost = all_terms_cost(named_shape("Qwen/Qwen3.5-9B"), named_hardware("h100"))
    narrow = replace(cost, uplink_bytes_per_second=cost.far.bytes_per_second / 4)
    more = narrow.sweep_seconds(16, 1, 2) - cost.sweep_seconds(16, 1, 2)
    assert more == pytest.approx(2 * cost.sweep_bytes * 3 / cost.far.bytes_per_second)
    alone = replace(cost, crosses_node=True).reach(np.array([1, 2, 9]))
    assert list(alone.far_rounds) == [0, 1, 2]
