"""What the tasks and rounds of a plan do, followed token by token and key by key."""

from collections import Counter

from testing import visible_pairs

from lengthwise.core.plan import Plan
from lengthwise.program import lower_microbatch, lower_plan


def covered_pairs(plan: Plan, window: int | None = None) -> Counter[tuple[int, int, int]]:
    """Count each (sequence, query, key) that any task of any rank sees, from the tokens its offsets point to."""
    pairs: Counter[tuple[int, int, int]] = Counter()
    for rank in range(plan.ranks):
        for whole in lower_plan(plan, rank):
            program = whole.with_window(window)
            own = [(s.sequence, t) for s in program.segments(rank) for t in range(s.start, s.stop)]
            first_blocks: Counter[int] = Counter()
            for ring_step in range(program.ring_steps):
                for task in program.tasks(rank, ring_step):
                    held = [
                        (s.sequence, t) for s in program.shard(task.piece, task.owner) for t in range(s.start, s.stop)
                    ]
                    queries, keys = own[task.q_start : task.q_stop], held[task.kv_start : task.kv_stop]
                    assert queries
                    assert keys
                    first_blocks.update(range(task.q_start, task.q_stop) if task.causal else ())
                    for row, (sequence, query) in enumerate(queries):
                        seen = 0
                        for column, (other, key) in enumerate(keys):
                            assert other == sequence == task.sequence
                            hidden = task.causal and column > task.distance + row
                            far = task.window is not None and task.distance + row - column >= task.window
                            if task.causal or task.window is not None:
                                gap = task.distance + row - column
                                assert task.window is None or gap == query - key, "distance must be that of the tokens"
                            if not hidden and not far:
                                pairs[sequence, query, key] += 1
                                seen += 1
                        assert seen, "a row without a visible key would weigh as if it had seen something"
            assert first_blocks == Counter(range(len(own))), "every query is in exactly one diagonal block"
    return pairs


def expected_pairs(plan: Plan, window: int | None = None) -> Counter[tuple[int, int, int]]:
    return Counter(
        (i, query, key)
        for i, length in enumerate(plan.tokens)
        for query, key in visible_pairs(length)
        if window is None or query - key < window
    )


def follow_rounds(plan: Plan, window: int | None = None) -> None:
    """Run the rounds on sets: keys are sent only by who holds them, and each owner gets every share exactly once."""
    for index in range(len(plan.microbatches)):
        program = lower_microbatch(plan, index).with_window(window)
        pieces = program.microbatch.pieces
        computed = {}  # (piece, position, owner) -> ring step of its blocks
        for p, piece in enumerate(pieces):
            for j, rank in enumerate(piece.ranks):
                for ring_step in range(program.ring_steps):
                    for task in program.tasks(rank, ring_step):
                        if task.piece == p:
                            computed[p, j, task.owner] = ring_step
        for rounds in (program.forward_rounds, program.backward_rounds):
            held = {(p, j): {j} for p, piece in enumerate(pieces) for j in range(piece.degree)}
            shares: dict[tuple[int, int, int], Counter[int]] = {}
            for ring_step in range(max(len(rounds), program.ring_steps)):
                for (p, j, owner), when in computed.items():
                    if when == ring_step:
                        assert owner in held[p, j], f"ring step {ring_step}: position {j} lacks the keys of {owner}"
                arrivals = []
                for t in rounds[ring_step].transfers if ring_step < len(rounds) else ():
                    ring = pieces[t.piece].ranks
                    source, target = ring.index(t.source), ring.index(t.target)
                    assert t.tokens == program.shard_tokens(t.piece, t.owner) > 0
                    assert (target - source) % len(ring) in (1, len(ring) - 1), "only neighbours of the ring talk"
                    if t.content == "kv":
                        assert t.owner in held[t.piece, source]
                        arrivals.append(((t.piece, target), t.owner))
                    else:
                        mine = shares.pop((t.piece, source, t.owner), Counter())
                        arrivals.append(((t.piece, target, t.owner), mine))
                if rounds is program.backward_rounds:
                    for (p, j, owner), when in computed.items():
                        if when == ring_step:
                            shares.setdefault((p, j, owner), Counter())[j] += 1
                for key, what in arrivals:
                    if isinstance(what, Counter):
                        shares.setdefault(key, Counter()).update(what)
                    else:
                        held[key].add(what)
            if rounds is program.backward_rounds:
                expected: dict[tuple[int, int, int], Counter[int]] = {}
                for p, j, owner in computed:
                    expected.setdefault((p, owner, owner), Counter())[j] += 1
                assert {key: share for key, share in shares.items() if share} == expected
