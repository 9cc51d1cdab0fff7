"""Where layers are cut into chunks: the slowest is as quick as can be."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from lengthwise.program.stage_program import cut_layers

ENDS = st.integers(0, 12)


@given(seconds=st.lists(st.integers(1, 9), min_size=1, max_size=8), first=ENDS, last=ENDS, chunks=st.integers(1, 4))
def test_no_other_cut_of_the_layers_has_a_quicker_slowest_chunk(seconds, first, last, chunks):
    chunks = min(chunks, len(seconds))

    def slowest(borders):
        edges = [0, *borders, len(seconds)]
        took = [sum(seconds[a:b]) for a, b in pairwise(edges)]
        took[0] += first
        took[-1] += last
        return max(took)

    found = cut_layers(seconds, chunks, first_seconds=first, last_seconds=last)
    assert [layer for each in found for layer in each] == list(range(len(seconds)))
    assert all(found)
    best = min(slowest(each) for each in combinations(range(1, len(seconds)), chunks - 1))
    assert slowest([each.stop for each in found[:-1]]) == best
