"""A session whose optimizer is in the host's memory gives the same bits."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from loops import ADAMW, CONSTANT, in_ranks, planned_loop, same
from testing.saved import whole_state
from testing.small import small_model, steps_of

from lengthwise import Session
from lengthwise.core.errors import LengthwiseError
from lengthwise.cost import StepMemory, check_host, named_shape
from lengthwise.cost.measured import base_cost
from lengthwise.session import open as session_open
from lengthwise.session.ranks import SessionRanks
from tiers import some


def loop(_rank, **options):
    """Train; return (loss, norm) of each step, and the state after."""
    model = small_model(torch.bfloat16, tie_word_embeddings=True)
    optimizer = ADAMW(model.parameters())
    with Session(model, optimizer, capacity_tokens=64, **options) as session:
        return planned_loop(session, optimizer, CONSTANT(optimizer), steps_of([[97, 5], [1, 81]])), whole_state(session)


@pytest.mark.parametrize("options", some([{"shard": "zero1"}, {"shard": "hybrid", "ranks_per_node": 1}]))
def test_a_loop_with_its_optimizer_on_the_host_is_the_same_to_the_bit(options, tmp_path):
    found, expected = (
        in_ranks(partial(loop, offload_optimizer=each, **options), 2, tmp_path) for each in (True, False)
    )
    assert same(found, expected)
    assert found[0][1]["state"], "states were compared"


def test_what_cannot_be_offloaded_is_refused():
    model = small_model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(LengthwiseError, match="offload_optimizer"):
        Session(model, optimizer, capacity_tokens=64, offload_optimizer=True)
    memory = StepMemory(shape=named_shape("llama-7b"), dtype_bytes=2, ranks=8, offloads=True)
    check_host(memory, 8, 200e9, key="offload_optimizer")  # 16 bytes a parameter
    with pytest.raises(LengthwiseError, match=r"offload_optimizer.*106 GB of host memory.*8 ranks.*got 90 GB"):
        check_host(memory, 8, 90e9, key="offload_optimizer")


# A rank among eight on one node, which asks no other.
RANKS = SessionRanks(transport=SimpleNamespace(world_size=8, rank=0, device_ranks=1), local_ranks=8, say=print)


@pytest.mark.parametrize(("offloads", "shard"), [(False, "zero3"), (True, "zero1")])
def test_a_layout_is_taken_by_what_stays_on_the_gpu(offloads, shard, monkeypatch):
    """Beside 6 bytes a parameter 8 ranks keep 2 of optimizer and sums each, or 0.5; 7.5 fit in what is free."""
    model = small_model(torch.bfloat16, hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    size = sum(each.numel() for each in model.parameters())
    room = {"cuda": (6 + 1.5) * size / 0.9, "cpu": 1e12}
    monkeypatch.setattr(session_open, "free_bytes", lambda device, _: room[device.type])
    monkeypatch.setattr(session_open, "least", lambda _, numbers: list(numbers))
    monkeypatch.setattr(session_open, "from_first", lambda _, work: work())
    given = {"capacity_tokens": 128, "recompute": "layer", "heads": "off", "device": "cuda:0"}
    given["offload_optimizer"] = offloads
    settings = session_open.check_settings(model, ADAMW(model.parameters()), given)
    cost = base_cost(settings.trained.shape, "h100", precision="bf16")
    assert session_open.with_layout(settings, RANKS, cost).asked.shard == shard
    session_open._check_host_optimizer(settings, RANKS)
    room["cpu"] = 15.0 * size
    with pytest.raises(LengthwiseError, match="8 ranks") if offloads else nullcontext():
        session_open._check_host_optimizer(settings, RANKS)
