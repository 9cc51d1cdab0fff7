"""The tensors of a rank's segments: ids, positions and labels, however sequences are cut."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from testing import make_batch

from lengthwise.program import Segment


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.data())
def test_batch_cuts_give_each_token_its_own_position_and_the_label_of_the_next(lengths, data):
    """However a sequence is cut, a shard's last token is asked for the first of the next; the very last for none."""
    batch = make_batch(lengths, vocab=50, seed=1, masked=0.3)
    segments = []
    for index, length in enumerate(lengths):
        cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=3))})
        segments += [Segment(sequence=index, start=a, stop=b) for a, b in itertools.pairwise(cuts)]
    shuffled = data.draw(st.permutations(segments))
    ids, positions, labels = batch.tensors(shuffled)
    whole = [batch.whole(index) for index in range(len(lengths))]
    expected = [(s.sequence, place) for s in shuffled for place in range(s.start, s.stop)]
    assert positions.tolist() == [place for _, place in expected]
    assert ids.tolist() == [whole[i][0][place].item() for i, place in expected]
    assert labels.tolist() == [whole[i][1][place].item() for i, place in expected]
    for index in range(len(lengths)):
        own = batch.dataset.read(index, 0, lengths[index])[1].tolist()
        assert whole[index][1].tolist() == [*own[1:], -100]
    assert batch.loss_tokens == sum(int((labels != -100).sum()) for _, labels in whole)
