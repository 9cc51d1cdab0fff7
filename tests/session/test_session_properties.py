"""A planned step gives what the plain loop gives for any lengths, ranks and capacities."""

import tempfile
from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st
from loops import both_loops, in_ranks, rows_of

from lengthwise.models import keep_double
from properties import costliest

LENGTHS = st.lists(st.integers(1, 140), min_size=1, max_size=9)


@costliest
@given(steps=st.lists(LENGTHS, min_size=1, max_size=2), ranks=st.integers(1, 5), spare=st.integers(0, 40))
def test_a_planned_loop_is_the_plain_loop_for_any_lengths(steps, ranks, spare):
    rows = [rows_of(lengths, seed) for seed, lengths in enumerate(steps)]
    most = max(len(row["input_ids"]) for step in rows for row in step)
    make = partial(torch.optim.AdamW, lr=1e-2)

    def work(_rank):
        with keep_double(torch.float64):
            return both_loops(make, capacity=-(-most // ranks) + spare, steps=rows)

    with tempfile.TemporaryDirectory() as folder:
        for loss, norm, weights in in_ranks(work, ranks, folder):
            assert loss < 1e-12
            assert norm < 1e-11
            assert weights < 1e-9
