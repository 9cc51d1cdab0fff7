"""The step's end: fused and not, moments there from the start, and a rehearsal that changes no bit."""

import pytest
import torch
from testing.strict import StrictWorld
from torch import nn
from transformers import LlamaConfig

from lengthwise.comm import SoloTransport
from lengthwise.config import OptimizerConfig
from lengthwise.engine.live_bytes import LiveBytes
from lengthwise.engine.optimizer import ShardedOptimizer, kept_bytes, step_end_bytes
from lengthwise.engine.replicated import FlatParameters
from lengthwise.models import wrapped_layers
from lengthwise.models.load import build_skeleton

TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def make(transport, dtype, config, *, width=300, fused=None):
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3))
    random = torch.Generator().manual_seed(0)  # of its own: ranks of a strict world are threads
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05, generator=random)
    flat = FlatParameters(model, transport, dtype=dtype, layers=[*model], bucket_entries=1)
    return model, flat, ShardedOptimizer(flat, config, transport, fused=fused)


def train(model, flat, optimizer, steps=3):
    dtype = model[0].weight.dtype
    for step in range(steps):
        x = torch.randn(9, 300, generator=torch.Generator().manual_seed(step)).to(dtype)
        model(x).square().mean().backward()
        optimizer.update(1e-2, optimizer.reduce())
    return flat.master_weights.clone()


@pytest.mark.parametrize("max_grad_norm", [None, 1e-3, 1e6])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_fused_update_is_the_same_with_clipping_in_it(dtype, max_grad_norm):
    """Gradients so large that clipping matters; Adam alone would hide a factor: eps is large, too."""
    config = {"max_grad_norm": max_grad_norm, "eps": 1e-3, "weight_decay": 0.3}
    apart, fused = (
        train(*make(SoloTransport(), dtype, OptimizerConfig(**config), fused=fused)) for fused in (False, True)
    )
    torch.testing.assert_close(fused, apart, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * 0.1)  # of steps of 1e-2
    assert not torch.equal(apart, make(SoloTransport(), dtype, OptimizerConfig())[1].master_weights)


@pytest.mark.parametrize("fused", [False, True])
def test_shards_of_several_ranks_make_the_update_of_one(fused):
    config = OptimizerConfig(max_grad_norm=0.5)
    whole_model, whole, optimizer = make(SoloTransport(), torch.float64, config, fused=fused)
    train(whole_model, whole, optimizer)

    def work(transport):
        model, _, own = make(transport, torch.float64, config, fused=fused)
        for step in range(3):
            if transport.rank == step % transport.world_size:
                x = torch.randn(9, 300, generator=torch.Generator().manual_seed(step)).double()
                model(x).square().mean().backward()
            own.update(1e-2, own.reduce())
        return [each.detach().clone() for each in model.parameters()]

    for found in StrictWorld(3).run(work):
        for got, wanted in zip(found, whole_model.parameters(), strict=True):
            torch.testing.assert_close(got, wanted.detach(), rtol=1e-12, atol=1e-14)


def test_fused_is_for_gpus_unless_asked_for():
    assert not make(SoloTransport(), torch.float32, OptimizerConfig())[2].fused
    assert make(SoloTransport(), torch.float32, OptimizerConfig(), fused=True)[2].fused


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_all_that_is_kept_is_there_before_the_first_step_and_its_end_needs_what_is_said(dtype, fused):
    with LiveBytes() as live:
        model, flat, optimizer = make(SoloTransport(), dtype, OptimizerConfig(), width=1200, fused=fused)
        live.peak_bytes = before = live.now_bytes
        optimizer.rehearse()
        assert live.now_bytes - before < 64
    assert before - kept_bytes(model, flat, OptimizerConfig()) < 1 << 14  # counters of steps
    assert live.peak_bytes - before <= step_end_bytes(flat, OptimizerConfig()) + (1 << 14)


class Silent(SoloTransport):
    """A rank of a world in which nobody answers."""

    def all_gather(self, output, source):
        assert len(output) == len(source) * self.world_size


@pytest.mark.parametrize("world_size", [8, 64])
def test_an_8b_model_starts_and_ends_a_step_within_6_and_16_by_w_bytes_a_parameter_and_one_layer(world_size):
    """Of Llama 3's shape in bf16, on no device: operations are counted, not run."""
    config = LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = build_skeleton(config)
    parameters = sum(each.numel() for each in model.parameters())
    assert 8.0e9 < parameters < 8.1e9
    layers = wrapped_layers(model)
    layer = sum(each.numel() for each in layers[0].parameters())
    transport = Silent()
    transport.world_size = world_size
    with LiveBytes() as live:
        flat = FlatParameters(model, transport, dtype=torch.bfloat16, device=torch.device("meta"), layers=layers)
        optimizer = ShardedOptimizer(flat, OptimizerConfig(), transport, fused=True)
        optimizer.step(1e-3, 1.0)
        flat.publish()
    kept = parameters * (6 + 16 / world_size)
    assert kept <= live.now_bytes < kept * 1.001
    assert live.peak_bytes <= kept + 2 * layer


@pytest.mark.parametrize("fused", [False, True])
def test_a_rehearsed_step_end_changes_no_bit_of_what_follows(fused):
    config, found = OptimizerConfig(weight_decay=0.5), []
    for rehearses in (False, True):
        model, flat, optimizer = make(SoloTransport(), torch.float32, config, fused=fused)
        if rehearses:
            before = flat.master_weights.clone()
            optimizer.rehearse()
            assert torch.equal(flat.master_weights, before)
        found.append(train(model, flat, optimizer))
    assert torch.equal(*found)
