"""The order in which sharded parameters are gathered and reduced, whatever a rank has, and what breaks it."""

import copy
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import RecordingTransport, make_plan, random_plan
from testing.laid import freed_parameters
from testing.late import LateTransport
from testing.order import check_order, rank_groups
from testing.strict import StrictWorld

from engine.sharded_runs import CPU, KINDS, LENGTHS, WAVES, build, in_waves, run, shard
from lengthwise.core.errors import ModelRefused
from lengthwise.core.plan import Piece
from lengthwise.engine.units import UnitPart
from lengthwise.models import wrapped_layers
from properties import costliest
from tiers import some


@given(
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(KINDS),
    family=st.sampled_from(("llama", "mistral")),
    tied=st.booleans(),
    chunks=st.sampled_from((None, 1, 5)),
)
@costliest
def test_all_that_ranks_post_completes_on_one_strict_queue_a_rank(seed, kind, family, tied, chunks):
    """Gathers, sums, heads and rings; collectives of a node's ranks have the same keys, whatever tokens these have."""
    choose = random.Random(seed)
    ranks, per_node = choose.choice(((2, 2), (3, 3), (4, 4), (4, 2), (6, 2), (6, 3)))
    lengths = [choose.randint(2, 40) for _ in range(choose.randint(1, 6))]
    plan = in_waves(random_plan(choose, ranks, lengths, layers=2, num_heads=4), kind)
    model = build(family, tie_word_embeddings=tied)
    windows = [getattr(model.config, "sliding_window", None)] * 2

    def work(transport):
        own, recording = copy.deepcopy(model), RecordingTransport(transport)
        at_once = None if chunks is None else chunks * own.config.vocab_size
        run(own, shard(own, recording, ranks_per_node=per_node), recording, plan, lengths, logits_at_once=at_once)
        return [each.key for each in recording.calls if each.key is not None]

    keys = StrictWorld(ranks).run(work)
    assert keys == [keys[rank - rank % per_node] for rank in range(ranks)]
    how = {"windows": windows, "tied": tied, "ranks_per_node": per_node}
    for rank in range(0, ranks, per_node):
        labels = [label for label, posted in rank_groups(plan, rank, **how) if ", " in label]
        expected = [each.split(", ")[1:] for each in labels if " of unit " in each]
        got = [["backward" if key.is_backward else "forward", key.kind] for key in keys[rank]]
        assert got == [[name, what.split()[0]] for name, what in expected], "as `check_order` has them"
    assert check_order(plan, layers=2, **how) >= 0


def freed_as_nan(self):
    self.wait()
    self._whole.fill_(float("nan"))


@pytest.mark.parametrize("kind", some(KINDS, 1))
def test_nothing_is_read_before_it_is_there_or_after_it_is_freed(kind, monkeypatch):
    """Under a transport that moves at `wait`, with NaN in what has not arrived and in units that were freed."""
    model, plan = build(tie_word_embeddings=False), in_waves(make_plan(3, LENGTHS, WAVES, layers=2), kind)

    def work(transport, around):
        own, transport = copy.deepcopy(model), around(transport)
        parameters = shard(own, transport)
        run(own, parameters, transport, plan, logits_at_once=7 * own.config.vocab_size)
        run(own, parameters, transport, plan, logits_at_once=7 * own.config.vocab_size, train=False)
        return parameters.gather_gradients()

    expected = StrictWorld(3).run(lambda t: work(t, lambda t: t))
    monkeypatch.setattr(UnitPart, "free", freed_as_nan)
    found = StrictWorld(3).run(lambda t: work(t, LateTransport))
    for name, each in expected[0].items():
        assert torch.equal(found[0][name], each), name


def test_a_model_that_runs_its_layers_in_another_order_is_refused():
    plan = in_waves(make_plan(2, (5,), [[Piece(ranks=(0,), sequences=(0,))]], layers=2))

    def work(transport):
        model = build()
        layers = wrapped_layers(model)[::-1]
        parameters = freed_parameters(model, transport, dtype=torch.float64, device=CPU, layers=layers)
        run(model, parameters, transport, plan, (5,))

    with pytest.raises(ModelRefused, match="layer 0 again, or late"):
        StrictWorld(2).run(work)
