"""The order rules (a) to (e): one named test each, and the strict reading that finds what breaks them."""

import ast
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing import draw_lengths, make_plan, random_plan
from testing.order import Operation, StrictMatcher, check_order, rank_groups

import lengthwise
from lengthwise.core.errors import PlanError
from lengthwise.core.plan import RECOMPUTE_KINDS, Piece
from lengthwise.program import last_on_all_ranks, lower_microbatch, refuse_unsupported

SOURCE = Path(lengthwise.__file__).parent
RING = Piece(ranks=(0, 2, 1), sequences=(0,))
PAIR = Piece(ranks=(1, 2), sequences=(1,))


def send(peer, size=1):
    return Operation(kind="send", peer=peer, size=size)


def receive(peer, size=1):
    return Operation(kind="receive", peer=peer, size=size)


@given(choose=st.randoms(use_true_random=False), ranks=st.integers(2, 7), count=st.integers(1, 5))
def test_order_a_each_round_is_one_grouped_call_with_the_same_pairing_on_both_sides(choose, ranks, count):
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, count))
    posted: dict[str, dict[int, list[Operation]]] = {}
    for rank in range(ranks):
        labels = []
        for label, operations in rank_groups(plan, rank, windows=[None] * 2):
            labels.append(label)
            posted.setdefault(label, {})[rank] = operations
        assert len(labels) == len(set(labels)), "one grouped call a round and rank"
    for label, calls in posted.items():
        if label == "step end":
            assert calls.keys() == set(range(ranks))
            continue
        sent = {}
        received = {}
        for rank, operations in calls.items():
            for operation in operations:
                if operation.kind == "send":
                    sent.setdefault((rank, operation.peer), []).append(operation.size)
                else:
                    received.setdefault((operation.peer, rank), []).append(operation.size)
        assert sent == received, label  # order within a pair included


def test_order_a_an_empty_transfer_is_left_out_on_both_sides():
    plan = make_plan(5, [2], [Piece(ranks=(3, 1, 4, 0, 2), sequences=(0,))])
    program = lower_microbatch(plan, 0)
    holders = {rank for rank in range(5) if sum(s.num_tokens for s in program.segments(rank))}
    assert len(holders) < 5
    for ring_step, each in enumerate((*program.forward_rounds, *program.backward_rounds)):
        assert all(t.tokens > 0 for t in each.transfers), f"round {ring_step}"
    first = [(t.source, t.target) for t in program.forward_rounds[0].transfers]
    assert {source for source, _ in first} == holders
    assert check_order(plan) == sum(len(each.transfers) for each in (*program.forward_rounds, *program.backward_rounds))


def package_files():
    return [(path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text())) for path in SOURCE.rglob("*.py")]


def test_order_b_only_comm_talks_to_torch_distributed():
    for name, tree in package_files():
        if name.startswith("comm/"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("torch.distributed") for alias in node.names), name
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("torch.distributed"), name
                assert not (node.module == "torch" and any(a.name == "distributed" for a in node.names)), name
            if isinstance(node, ast.Attribute) and node.attr in {"distributed", "new_group", "init_process_group"}:
                pytest.fail(f"{name}:{node.lineno} uses {node.attr}")


def test_order_b_transfers_are_grouped_calls_only():
    single = {"isend", "irecv", "send", "recv", "send_object_list", "recv_object_list"}
    grouped = 0
    for name, tree in package_files():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            on = ast.unparse(node.func.value)
            if node.func.attr in single and not re.search("pipe|conn", on):
                pytest.fail(f"{name}:{node.lineno} calls {on}.{node.func.attr}")
            if node.func.attr == "batch_isend_irecv":
                assert name.startswith("comm/"), name
                grouped += 1
    assert grouped == 1


def test_order_d_collectives_come_after_the_last_round_on_each_rank():
    choose = random.Random(5)
    plan = random_plan(choose, 5, draw_lengths(choose, 5, 8))
    for rank in range(5):
        kinds = [operations[0].kind for _, operations in rank_groups(plan, rank, windows=[None] * 3)]
        assert kinds[-1] == "collective"
        assert kinds.count("collective") == 1


def test_order_d_a_collective_before_the_last_round_deadlocks():
    """What the rule is there for: rank 0 reduces while rank 1 still waits for its next ring message."""
    plan = make_plan(2, [8, 8], [Piece(ranks=(0, 1), sequences=(0,)), Piece(ranks=(0, 1), sequences=(1,))])
    matcher = StrictMatcher(2)
    for rank in range(2):
        groups = list(rank_groups(plan, rank, windows=[None]))
        if rank == 0:
            groups.insert(1, groups.pop())
        for label, operations in groups:
            matcher.post(rank, label, operations)
    list(matcher.progress())
    assert matcher.stuck() == {0: "step end", 1: "microbatch 0, layer 0, backward, ring step 0"}


@given(choose=st.randoms(use_true_random=False), ranks=st.integers(1, 7), count=st.integers(1, 6))
def test_order_d_counting_is_a_sub_step_with_its_rings_before_its_collective(choose, ranks, count):
    plan, windows = random_plan(choose, ranks, draw_lengths(choose, ranks, count)), [None, 5]
    kept = last_on_all_ranks(plan)
    again = {f"microbatch {index}," for index in range(len(plan.microbatches)) if index not in kept}
    for rank in range(ranks):
        plain = dict(rank_groups(plan, rank, windows=windows))
        groups = list(rank_groups(plan, rank, windows=windows, counts_routers=True))
        place = [label for label, _ in groups].index("sum of counts")
        counting, step = groups[:place], groups[place + 1 :]
        assert not any("backward" in label for label, _ in counting)
        forward = [(label, operations) for label, operations in plain.items() if "forward" in label]
        assert [(label.replace("counting", "forward"), operations) for label, operations in counting] == forward
        assert all(("counting" in label) == label.startswith(tuple(again)) for label, _ in counting)
        ran = {label: each for label, each in plain.items() if "forward" not in label or label.startswith(tuple(again))}
        assert len(step) == len(ran)
        assert dict(step) == ran
        if any(label.startswith(tuple(again)) for label, _ in step):
            first = next(i for i, (label, _) in enumerate(step) if label.startswith(tuple(again)))
            assert all(label.startswith(tuple(again)) for label, _ in step[first:-1]), "kept graphs are freed first"
    more = sum(
        len(each.transfers)
        for index in set(range(len(plan.microbatches))) - kept
        for window in windows
        for each in lower_microbatch(plan, index).with_window(window).forward_rounds
    )
    assert check_order(plan, windows=windows, counts_routers=True) == check_order(plan, windows=windows) + more


def test_microbatch_last_on_all_ranks_by_hand():
    pieces = [Piece(ranks=ranks, sequences=(i,)) for i, ranks in enumerate([(0, 1), (2,), (1, 2), (3, 0), (3,), (4,)])]
    assert last_on_all_ranks(make_plan(6, [9] * 6, pieces)) == {2, 4, 5}
    beside = make_plan(3, [9, 9, 9], [[pieces[0], pieces[1]], Piece(ranks=(0,), sequences=(2,))])
    assert last_on_all_ranks(beside) == {1}, "all pieces of a microbatch run as one"


def recomputing(plan, *kinds):
    return replace(
        plan, microbatches=tuple(replace(m, recompute=kind) for m, kind in zip(plan.microbatches, kinds, strict=True))
    )


def test_order_e_recomputation_runs_the_forward_rounds_again_before_each_layers_backward():
    plan = recomputing(make_plan(3, [8, 4], [RING, PAIR]), "layer", "all_but_attention")
    refuse_unsupported(plan)
    labels = [label for label, _ in rank_groups(plan, 2, windows=[None] * 2)]
    layers = [label.removeprefix("microbatch 0, layer ") for label in labels if label.startswith("microbatch 0")]
    forward, again, backward = (
        [f"{name}, ring step {ring_step}" for ring_step in range(ring_steps)]
        for name, ring_steps in (("forward", 2), ("forward again", 2), ("backward", 4))
    )
    assert layers == [
        *(f"{layer}, {label}" for layer in (0, 1) for label in forward),
        *(f"{layer}, {label}" for layer in (1, 0) for label in (*again, *backward)),
    ]
    assert not any("again" in label for label in labels if label.startswith("microbatch 1"))


@given(choose=st.randoms(use_true_random=False), ranks=st.integers(2, 7), count=st.integers(1, 5))
def test_order_e_any_plan_with_any_recomputation_completes(choose, ranks, count):
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, count))
    kinds = [choose.choice(RECOMPUTE_KINDS) for _ in plan.microbatches]
    again = sum(
        len(each.transfers)
        for index, kind in enumerate(kinds)
        if kind == "layer"
        for each in lower_microbatch(plan, index).forward_rounds
    )
    assert check_order(recomputing(plan, *kinds), layers=2) == check_order(plan, layers=2) + 2 * again


def test_order_e_a_rank_that_recomputes_alone_is_found():
    """Why recomputation belongs to the plan: the others take what one rank sends again for something else."""
    plan = make_plan(3, [8, 4], [RING, PAIR])
    matcher = StrictMatcher(3)
    for rank in range(3):
        mine = recomputing(plan, "none", "layer") if rank == 1 else plan
        for label, operations in rank_groups(mine, rank, windows=[None]):
            matcher.post(rank, label, operations)
    with pytest.raises(PlanError, match="rank 1"):
        list(matcher.progress())


def test_order_check_finds_no_deadlock_in_overlapping_rings():
    """Rings that overlap like tiles: each rank's second ring waits for its neighbour's first."""
    plan = make_plan(
        12,
        [9] * 22,
        [Piece(ranks=(i, i + 1), sequences=(i,)) for i in range(11)]
        + [Piece(ranks=(i + 1, i), sequences=(21 - i,)) for i in reversed(range(11))],
    )
    assert check_order(plan, layers=1) == 22 * 6  # a ring of two: keys forward, keys backward, gradients back


def test_order_check_finds_ranks_in_opposite_microbatch_orders():
    plan = make_plan(3, [9, 7], [Piece(ranks=(0, 1), sequences=(0,)), Piece(ranks=(0, 1), sequences=(1,))])
    opposite = replace(plan, microbatches=plan.microbatches[::-1])
    matcher = StrictMatcher(3)
    for rank, mine in ((0, plan), (1, opposite), (2, plan)):
        for label, operations in rank_groups(mine, rank, windows=[None]):
            matcher.post(rank, label, operations)
    with pytest.raises(PlanError, match=r"rank \d to rank \d"):
        list(matcher.progress())


def test_order_check_names_ranks_of_a_deadlock(monkeypatch):
    """`check_order` itself, on ranks that lower another plan each."""
    from testing import order

    a, b, c = (Piece(ranks=(i, (i + 1) % 3), sequences=(i,)) for i in range(3))
    plans = {0: (a, c), 1: (b, a), 2: (c, b)}
    lower = order.lower_plan
    monkeypatch.setattr(order, "lower_plan", lambda _, rank, **__: lower(make_plan(3, [6, 6, 6], plans[rank]), rank))
    with pytest.raises(PlanError, match=r"deadlock.*rank 0 in.*rank 1 in.*rank 2 in"):
        check_order(make_plan(3, [6, 6, 6], [a, b, c]))


def test_matcher_refuses_sizes_that_differ():
    matcher = StrictMatcher(2)
    matcher.post(0, "here", [send(1, size=("kv", 8))])
    matcher.post(1, "there", [receive(0, size=("kv", 9))])
    with pytest.raises(PlanError, match=r"rank 0 to rank 1.*9.* in there.*8.* in here"):
        list(matcher.progress())


def test_matcher_completes_a_group_only_as_a_whole():
    """Rank 0's second group must not start while its first still misses one message."""
    matcher = StrictMatcher(3)
    first = matcher.post(0, "first", [send(1), send(2)])
    second = matcher.post(0, "second", [receive(1)])
    matcher.post(1, "one", [receive(0)])
    late = matcher.post(1, "two", [send(0)])
    assert len(list(matcher.progress())) == 1
    assert not first.done
    assert not second.done
    assert not late.done
    assert matcher.stuck() == {0: "first", 1: "two"}
    matcher.post(2, "at last", [receive(0)])
    assert len(list(matcher.progress())) == 2
    assert first.done
    assert second.done
    assert late.done
    assert matcher.stuck() == {}


def test_matcher_lets_no_message_overtake():
    """The first send to rank 2 waits for its receive, so the second, though rank 2 asks for nothing else, waits too."""
    matcher = StrictMatcher(3)
    matcher.post(0, "sends", [send(1, size="a"), send(1, size="b"), send(2)])
    matcher.post(2, "other", [receive(0)])
    assert len(list(matcher.progress())) == 1
    matcher.post(1, "x", [receive(0, size="a")])
    matcher.post(1, "y", [receive(0, size="b")])
    assert len(list(matcher.progress())) == 2
    assert matcher.stuck() == {}


def test_matcher_needs_every_rank_for_a_collective():
    matcher = StrictMatcher(3)
    collective = [Operation(kind="collective")]
    matcher.post(0, "end", collective)
    matcher.post(1, "end", collective)
    assert list(matcher.progress()) == []
    assert matcher.stuck() == {0: "end", 1: "end"}
    matcher.post(2, "end", collective)
    assert len(list(matcher.progress())) == 1
    assert matcher.stuck() == {}
