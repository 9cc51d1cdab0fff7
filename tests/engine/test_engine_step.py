"""The order of a rank's step: what the next microbatch needs is made while this one is under way."""

import pytest
import torch
from testing import make_batch
from transformers import Gemma3TextConfig

from lengthwise.attention import choose_kernel, planned
from lengthwise.comm import SoloTransport
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.step import run_plan
from lengthwise.models import ModelSource, build_model

CPU = torch.device("cpu")
WINDOW = 6


@pytest.mark.parametrize("train", [True, False])
def test_the_next_microbatch_is_prepared_before_this_ones_backward(monkeypatch, train):
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma3TextConfig(**sizes, **kinds, num_key_value_heads=1, head_dim=8, vocab_size=48)
    model = build_model(ModelSource(name="gemma", config=config, weights=False), seed=0)
    told, lengths = list[str](), (9, 5, 7)
    _tell(monkeypatch, told, StepBatch, "tensors", "tensors")
    _tell(monkeypatch, told, planned, "ring_steps_of", "lowered")
    _tell(monkeypatch, told, torch.Tensor, "backward", "backward")
    model.register_forward_pre_hook(lambda *_: told.append("forward"))
    plan = Plan(
        ranks=1,
        layers=2,
        capacity=9,
        tokens=lengths,
        microbatches=tuple(Microbatch(pieces=(Piece(sequences=(i,), ranks=(0,)),)) for i in range(len(lengths))),
    )
    run_plan(model, plan, make_batch(lengths, vocab=48), SoloTransport(), choose_kernel(CPU), name="test", train=train)
    backward, ahead = ["backward"] * train, ["lowered", "lowered", "tensors"]
    first = ["tensors", "forward", "lowered", "lowered"]  # which windows there are the first one tells
    assert told == [*first, *ahead, *backward, "forward", *ahead, *backward, "forward", *backward]


def _tell(monkeypatch, told, owner, name, word):
    done = getattr(owner, name)

    def telling(*arguments, **keys):
        told.append(word)
        return done(*arguments, **keys)

    monkeypatch.setattr(owner, name, telling)
