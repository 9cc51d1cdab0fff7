"""What the tasks and rounds of a plan do, followed token by token and key by key."""

from collections import Counter

from testing import make_plan, visible_pairs
from testing.plans import line_to

from lengthwise.core.plan import Plan
from lengthwise.program import HeadRange, lower_microbatch, lower_plan
from lengthwise.program.split_heads import group_of, group_runs

Token = tuple[int, int]  # sequence, and token of it
Pairs = dict[HeadRange, Counter[tuple[Token, Token]]]


def covered_pairs(plan: Plan, window: int | None = None) -> Pairs:
    """Count each (query, key) that tasks see, by range of heads, from what their offsets point to."""
    pairs: Pairs = {}
    for rank in range(plan.ranks):
        for program in (whole.with_window(window) for whole in lower_plan(plan, rank)):
            rows, first_blocks = rows_of(program, rank), Counter()
            for task in (task for ring_step in range(program.ring_steps) for task in program.tasks(rank, ring_step)):
                piece, mine = program.microbatch.pieces[task.piece], pairs.setdefault(task.heads, Counter())
                keys = ring_tokens(plan, piece, task.owner)[task.kv_start : task.kv_stop]
                queries = rows[task.heads][task.q_start : task.q_stop]
                assert queries
                assert keys
                first_blocks.update((task.heads, row) for row in range(task.q_start, task.q_stop) if task.causal)
                for row, query in enumerate(queries):
                    seen = 0
                    for column, key in enumerate(keys):
                        assert key[0] == task.sequence
                        gap, apart = task.distance + row - column, place_of(plan, query) - place_of(plan, key)
                        assert task.window is None or gap == apart, "distance must be that of the tokens"
                        if not (task.causal and gap < 0) and (task.window is None or gap < task.window):
                            mine[query, key] += 1
                            seen += 1
                    assert seen, "a row without a visible key would weigh as if it had seen something"
            every = Counter((heads, row) for heads, held in rows.items() for row in range(len(held)))
            assert first_blocks == every, "every query is in exactly one diagonal block"
    return pairs


def expected_pairs(plan: Plan, window: int | None = None) -> Pairs:
    found: Pairs = {}
    for piece in (piece for microbatch in plan.microbatches for piece in microbatch.pieces):
        for sequence in piece.sequences:
            text = [(each, token) for each in line_to(plan, sequence) for token in range(plan.tokens[each])]
            first = len(text) - plan.tokens[sequence]
            seen = Counter(
                (text[query], text[key])
                for query, key in visible_pairs(len(text))
                if query >= first and (window is None or query - key < window)
            )
            for part in range(piece.heads):
                found.setdefault(HeadRange(part=part, parts=piece.heads), Counter()).update(seen)
    return found


def place_of(plan: Plan, token: Token) -> int:
    """Return the position of a token in its text."""
    return plan.firsts[token[0]] + token[1]


def ring_tokens(plan, piece, group):
    """List (sequence, token) of a ring position: those of its positions, each sequence in order."""
    program = lower_microbatch(make_plan(plan.ranks, plan.tokens, [piece]), 0)
    members = group_of(piece, group * piece.heads)
    return [
        (i, token)
        for i in piece.sequences
        for token in sorted(
            t for j in members for s in program.shard(0, j) if s.sequence == i for t in range(s.start, s.stop)
        )
    ]


def rows_of(program, rank):
    """List the (sequence, token) of each row, by range of heads, from what the members of groups hold."""
    rows = {}
    for index, piece, position in program.pieces_of(rank):
        heads = next(h for h, starts in program.row_starts(rank).items() if index in starts)
        assert heads == HeadRange(part=position % piece.heads, parts=piece.heads)
        assert program.row_starts(rank)[heads][index] == len(rows.get(heads, ()))
        lengths = [program.tokens[i] for i in piece.sequences]
        held = {
            j: [(s.sequence, t) for s in program.shard(index, j) for t in range(s.start, s.stop)]
            for j in group_of(piece, position)
        }
        runs = [
            each for run in group_runs(piece, lengths, position) for each in held[run.position][run.start : run.stop]
        ]
        assert Counter(runs) == Counter(each for those in held.values() for each in those)
        rows.setdefault(heads, []).extend(runs)
    return rows


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
