"""Scans and convolutions over cut and continued sequences equal those of whole texts, both passes, in fp64."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import draw_lengths, make_plan, random_plan, relative_error
from testing.plans import line_to, with_branches
from testing.strict import StrictWorld
from torch.utils._python_dispatch import TorchDispatchMode

from lengthwise.attention import Opened, convolve_spans, scan_spans
from lengthwise.attention.halos import Halo
from lengthwise.attention.mixing import LocalSpans
from lengthwise.attention.states import Map
from lengthwise.core.plan import Piece
from lengthwise.program import Mixing, far_peers, lower_plan
from properties import costly

HEADS, KEY, VALUE = 2, 3, 2
CASES = {"choose": st.randoms(use_true_random=False), "ranks": st.integers(1, 7), "count": st.integers(1, 5)}


class TokenByToken:
    """S_t = a_t S_(t-1) + b_t, a state (heads, key, value); out_t = q_t' S_t."""

    def __init__(self, is_matrix):
        self.is_matrix = is_matrix

    def run(self, tokens, lengths, *, before=None, states=False):
        opened = self.open(tokens, lengths)
        if before is None:
            before = torch.zeros_like(opened.b)
        readers = opened.reader.split(lengths, 1)
        after = Map(opened.a, opened.b, self.is_matrix)(before) if states else None
        out = torch.cat([self.read(*each) for each in zip(readers, before.split(1), strict=True)], 1)
        return opened.out + out, after

    def open(self, tokens, lengths):
        outs, readers, factors, lasts = [], [], [], []
        times = torch.matmul if self.is_matrix else torch.mul
        for a, b, q in zip(*(tokens[name].split(lengths, 1) for name in "abq"), strict=True):
            state = b.new_zeros(1, HEADS, KEY, VALUE)
            through = torch.eye(KEY, dtype=b.dtype).expand(1, HEADS, -1, -1)
            factor = through if self.is_matrix else b.new_ones(1, HEADS, 1, 1)
            for t in range(b.shape[1]):
                state, factor = times(a[:, t], state) + b[:, t], times(a[:, t], factor)
                outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state)[:, None])
                readers.append((q[:, t, :, None] @ (factor if self.is_matrix else factor * through))[:, None])
            factors.append(factor)
            lasts.append(state)
        none = [b.new_zeros(1, 0, HEADS, VALUE)], [b.new_zeros(1, 0, HEADS, 1, KEY)]
        out, reader = (torch.cat([*each, *empty], 1) for each, empty in zip((outs, readers), none, strict=True))
        return Opened(out=out, reader=reader, a=torch.cat(factors), b=torch.cat(lasts))

    def read(self, reader, state):
        return torch.einsum("bthok,bhkv->bthv", reader, state)


def drawn_tokens(length, is_matrix, seed):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"a": (KEY, KEY) if is_matrix else (1, 1), "b": (KEY, VALUE), "q": (KEY,)}
    tokens = {n: torch.randn(1, length, HEADS, *s, generator=draw, dtype=torch.float64) for n, s in shapes.items()}
    tokens["a"] *= 0.4
    grad = torch.randn(1, length, HEADS, VALUE, generator=draw, dtype=torch.float64)
    return {name: x.requires_grad_() for name, x in tokens.items()}, grad


def on_ranks(plan, rows, compute):
    """Return (out, gradients by name) of each sequence; rows: (tokens by name, gradient of the output) of each."""

    def work(transport):
        found = []
        programs = lower_plan(plan, transport.rank)
        transport.connect(far_peers(programs, transport.rank, Mixing(has_states=True, width=7)))
        for program in programs:
            segments = program.segments(transport.rank)
            parts = {n: [rows[each.sequence][0][n][:, each.start : each.stop] for each in segments] for n in rows[0][0]}
            held = {n: torch.cat(x, 1).detach() for n, x in parts.items()}
            num = max(1, sum(each.num_tokens for each in segments))  # a row of padding where there is none
            inputs = {n: torch.cat([x, x.new_zeros(1, num, *x.shape[2:])], 1)[:, :num] for n, x in held.items()}
            inputs = {n: x.requires_grad_() for n, x in inputs.items()}
            spans = LocalSpans(program, transport, num, SimpleNamespace(recomputation=None))
            out = compute(spans, inputs)
            grads = [rows[s.sequence][1][:, s.start : s.stop] for s in segments]
            (out[:, : sum(each.shape[1] for each in grads)] * torch.cat(grads, 1)).sum().backward()
            row = 0
            for s in segments:
                part = slice(row, row + s.num_tokens)
                found.append((s, out.detach()[:, part], {n: x.grad[:, part] for n, x in inputs.items()}))
                row = part.stop
        return found

    every = [each for those in StrictWorld(plan.ranks).run(work) for each in those]
    results = []
    for sequence in range(len(plan.tokens)):
        parts = sorted((each for each in every if each[0].sequence == sequence), key=lambda each: each[0].start)
        out = torch.cat([each[1] for each in parts], 1)
        results.append((out, {n: torch.cat([each[2][n] for each in parts], 1) for n in parts[0][2]}))
    return results


def check(plan, rows, compute, whole, bar=1e-12):
    """Compare with every text from its first token on, whatever of it a sequence continues."""
    total = torch.zeros((), dtype=torch.float64)
    found = on_ranks(plan, rows, compute)
    for sequence, ((tokens, grad), (out, _)) in enumerate(zip(rows, found, strict=True)):
        line = line_to(plan, sequence)
        text = {name: torch.cat([rows[each][0][name] for each in line], 1) for name in tokens}
        wanted = whole(text)[:, -plan.tokens[sequence] :]
        assert relative_error(out, wanted.detach()) <= bar
        total = total + (wanted * grad).sum()
    total.backward()
    for (tokens, _), (_, grads) in zip(rows, found, strict=True):
        assert all(relative_error(grads[name], x.grad) <= bar for name, x in tokens.items())


def drawn_plan(choose, ranks, count):
    return with_branches(choose, random_plan(choose, ranks, draw_lengths(choose, ranks, count)))


@costly
@given(is_matrix=st.booleans(), **CASES)
def test_any_plan_gives_each_token_the_state_of_its_own_text(is_matrix, choose, ranks, count):
    check_scan(drawn_plan(choose, ranks, count), is_matrix)


def check_scan(plan, is_matrix):
    scan = TokenByToken(is_matrix)
    rows = [drawn_tokens(length, is_matrix, seed) for seed, length in enumerate(plan.tokens)]
    check(plan, rows, lambda spans, x: scan_spans(spans, x, scan), lambda x: scan.run(x, [x["a"].shape[1]])[0])


def convolution(width):
    """Return a causal convolution of rows (rows, 3)."""
    weight = torch.randn(3, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def convolve(rows):
        padded = torch.nn.functional.pad(rows.t(), (width - 1, 0))[None]
        return torch.nn.functional.conv1d(padded, weight[:, None], groups=3)[0].t()

    return convolve


@costly
@given(width=st.sampled_from([2, 3, 4, 7]), **CASES)
def test_any_plan_convolves_within_each_text(width, choose, ranks, count):
    plan = drawn_plan(choose, ranks, count)
    draw, convolve, rows = torch.Generator().manual_seed(0), convolution(width), []
    for length in plan.tokens:
        x, grad = (torch.randn(1, length, 3, generator=draw, dtype=torch.float64) for _ in range(2))
        rows.append(({"x": x.requires_grad_()}, grad))
    check(
        plan,
        rows,
        lambda spans, x: convolve_spans(spans, x["x"][0], Halo(spans, width), convolve)[None],
        lambda x: convolve(x["x"][0])[None],
    )


def test_ranks_with_empty_spans_take_part_in_backward():
    """One token over three ranks, and a rank that holds nothing of a ring: no output of theirs reads a state."""
    given = ((0, 1, 2), (1.0, 0.0, 1.0)), ((2, 1, 0), None), ((1,), None), ((0, 2, 1), None)  # maps do not commute
    pieces = [Piece(ranks=ranks, sequences=(i,), shares=shares) for i, (ranks, shares) in enumerate(given)]
    check_scan(make_plan(3, (9, 1, 4, 17), pieces), is_matrix=True)


def test_a_rank_sends_one_state_and_one_map_a_pass_whatever_the_length():
    scan, sent = TokenByToken(is_matrix=True), {24: [0] * 4, 240: [0] * 4}
    for length, numbers in sent.items():
        plan = make_plan(4, [length], [Piece(ranks=(0, 2, 3, 1), sequences=(0,))])

        def compute(spans, x, numbers=numbers):
            exchange = spans.transport.exchange

            def counted(sends, receives):
                numbers[spans.transport.rank] += sum(x.numel() for x, _ in sends)
                return exchange(sends, receives)

            spans.transport.exchange = counted
            return scan_spans(spans, x, scan)

        on_ranks(plan, [drawn_tokens(length, True, 0)], compute)
    state, a_map = HEADS * KEY * VALUE, HEADS * KEY * (VALUE + KEY)
    assert sent[24] == sent[240] == [2 * state, 2 * a_map, 2 * (state + a_map), 2 * (state + a_map)]


def test_maps_do_not_multiply_in_tf32():
    """Where it is allowed, an fp32 product may be one; products of states are none of fp32."""
    found = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, _types, arguments=(), named=None):
            if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
                found.append(arguments[0].dtype)
            return function(*arguments, **(named or {}))

    a, b, state = (torch.randn(HEADS, KEY, each) for each in (KEY, VALUE, VALUE))
    step = Map(a, b, True)
    with Products():
        results = step(state), *step.after(step)[:2], step.transposed(b)(state), step.grad_of_a(b, state)
    assert found == [torch.float64] * 5
    assert {each.dtype for each in results} == {torch.float32}
    assert torch.equal(results[1], (a.double() @ a.double()).float())
