"""The host gives a device work without waiting for it: no number is read between microbatches, no copy waited for."""

import pytest
import torch
from testing import make_batch, make_plan, tiny_family_config
from testing.tiny import VOCAB
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from lengthwise.attention import choose_kernel, planned, to_device
from lengthwise.comm import SoloTransport
from lengthwise.config import OptimizerConfig
from lengthwise.core.plan import Piece
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.optimizer import ShardedOptimizer
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.step import run_plan
from lengthwise.models import ModelSource, build_model
from lengthwise.models.adapter import ATTENTION_NAME, register_attention

LENGTHS = (9, 12, 5, 7, 8, 3)
READS = ("_local_scalar_dense", "nonzero", "equal", "unique", "masked_select")


class Reads(TorchDispatchMode):
    """Counts operations whose result the host needs, or whose shape depends on values: on a GPU it waits for them."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in READS):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def reads(model_type, microbatches, *, experts="eager"):
    """Return the reads of the microbatches of a step, and those of its end."""
    register_attention()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        tiny_family_config(model_type), attn_implementation=ATTENTION_NAME, experts_implementation=experts
    ).train()
    transport = SoloTransport()
    flat = FlatParameters(model, transport, dtype=torch.float32)
    optimizer = ShardedOptimizer(flat, OptimizerConfig(), transport, fused=True)
    plan = make_plan(1, LENGTHS, [[Piece(ranks=(0,), sequences=each)] for each in microbatches])
    kernel = choose_kernel(torch.device("cpu"))
    with Reads() as during:
        run_plan(model, plan, make_batch(LENGTHS, vocab=48), transport, kernel, name="step")
    with Reads() as after:
        optimizer.end_step(1e-3)
    return during.found, after.found


@pytest.mark.parametrize(
    ("model_type", "experts"),
    [("gemma3_text", "eager"), ("qwen3_moe", "grouped_mm")],
)
def test_nothing_is_read_between_microbatches(model_type, experts):
    """The sums of losses are read once, when all of a step was posted, and once the norm of the gradient."""
    for microbatches in ([tuple(range(6))], [(0, 1), (2, 3), (4, 5)], [(i,) for i in range(6)]):
        during, after = reads(model_type, microbatches, experts=experts)
        assert during == []
        assert len(after) == 1
    assert experts == "eager" or reads(model_type, [tuple(range(6))])[0], "eager experts are read: this sees them"


def test_copies_to_a_gpu_go_through_pinned_memory_and_are_not_waited_for():
    called = []

    class Host:
        def pin_memory(self):
            called.append("pin")
            return self

        def to(self, device, *, non_blocking=False):
            called.append((device.type, non_blocking))

    to_device(Host(), torch.device("cuda", 0))
    assert called == ["pin", ("cuda", True)]
    here = torch.ones(3)
    assert to_device(here, torch.device("cpu")) is here


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
