"""The order of a rank's step: what the next microbatch needs is made while this one is under way."""

import pytest
import torch
from testing import make_batch, make_plan, tiny_family_config
from testing.tiny import VOCAB

from lengthwise.attention import choose_kernel, planned
from lengthwise.comm import SoloTransport
from lengthwise.core.plan import Piece
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.step import run_plan
from lengthwise.models import ModelSource, build_model


@pytest.mark.parametrize("train", [True, False])
def test_the_next_microbatch_is_prepared_before_this_ones_backward(monkeypatch, train):
    source = ModelSource(name="gemma", config=tiny_family_config("gemma3_text"), weights=False)  # windows in one layer
    model, told, lengths = build_model(source, seed=0), list[str](), (9, 5, 7)
    _tell(monkeypatch, told, StepBatch, "tensors", "tensors")
    _tell(monkeypatch, told, planned, "ring_steps_of", "lowered")
    _tell(monkeypatch, told, torch.Tensor, "backward", "backward")
    model.register_forward_pre_hook(lambda *_: told.append("forward"))
    plan = make_plan(1, lengths, [Piece(sequences=(i,), ranks=(0,)) for i in range(3)], layers=2)
    kernel = choose_kernel(torch.device("cpu"))
    run_plan(model, plan, make_batch(lengths, vocab=VOCAB), SoloTransport(), kernel, name="test", train=train)
    backward, ahead = ["backward"] * train, ["lowered", "lowered", "tensors"]
    first = ["tensors", "forward", "lowered", "lowered"]  # which windows there are the first one tells
    assert told == [*first, *ahead, *backward, "forward", *ahead, *backward, "forward", *backward]


def _tell(monkeypatch, told, owner, name, word):
    done = getattr(owner, name)

    def telling(*arguments, **keys):
        told.append(word)
        return done(*arguments, **keys)

    monkeypatch.setattr(owner, name, telling)
