"""Who speaks to torch.distributed, that recomputation completes, the order of rings, a microbatch last on all ranks."""

import ast
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from testing import draw_lengths, make_plan, random_plan
from testing.order import check_order
from testing.plans import in_turn

import lengthwise
from lengthwise.core.plan import RECOMPUTE_KINDS, Piece
from lengthwise.program import last_on_all_ranks, lower_microbatch, ring_order
from properties import costly

RANDOM = st.randoms(use_true_random=False)
SOURCE = Path(lengthwise.__file__).parent


def test_order_b_only_comm_talks_to_torch_distributed_and_in_grouped_calls_alone():
    single, grouped = re.compile(r"\.(isend|irecv|send|recv|(send|recv)_object_list)\("), []
    spoken = re.compile(
        r"torch\.distributed(?!\.elastic)|from torch import .*\bdistributed\b|\bnew_group\b|\binit_process_group\b"
    )
    for path in SOURCE.rglob("*.py"):
        name, text = path.relative_to(SOURCE).as_posix(), path.read_text()
        if not (spoken.search(text) or single.search(text) or ".batch_isend_irecv(" in text):
            continue
        code = code_of(text)
        assert name.startswith("comm/") or not spoken.search(code), name
        for line in code.splitlines():
            assert not single.search(line) or re.search("pipe|conn", line), f"{name}: {line}"
        grouped += [name] * code.count(".batch_isend_irecv(")
    assert len(grouped) == 1
    assert grouped[0].startswith("comm/")


def code_of(text):
    """Return a module's code without comments and texts."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.unparse(tree)


def test_microbatch_last_on_all_ranks_by_hand():
    pieces = [Piece(ranks=ranks, sequences=(i,)) for i, ranks in enumerate([(0, 1), (2,), (1, 2), (3, 0), (3,), (4,)])]
    assert last_on_all_ranks(make_plan(6, [9] * 6, pieces)) == {2, 4, 5}
    beside = make_plan(3, [9, 9, 9], [[pieces[0], pieces[1]], Piece(ranks=(0,), sequences=(2,))])
    assert last_on_all_ranks(beside) == {1}, "all pieces of a microbatch run as one"


@costly
@given(choose=RANDOM, ranks=st.integers(1, 8), count=st.integers(1, 6), heads=st.sampled_from([1, 840]))
def test_order_e_any_plan_with_split_heads_and_any_recomputation_completes(choose, ranks, count, heads):
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, count), num_heads=heads)
    kinds = [choose.choice(RECOMPUTE_KINDS) for _ in plan.microbatches]
    mixed = in_turn(plan, recompute=kinds)
    again = sum(
        len(each.transfers)
        for index, kind in enumerate(kinds)
        if kind == "layer"
        for each in lower_microbatch(plan, index).forward_rounds
    )
    assert check_order(mixed, layers=2) >= check_order(plan, layers=2) + 2 * again
    for windows in ([None, None], [3, None]):
        check_order(mixed, windows=windows, counts_routers=True)


@given(first=st.integers(0, 500), groups=st.integers(1, 40), heads=st.sampled_from([1, 2, 4, 8, 16]))
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
