"""A rank's step on a device: its memory from the start on, no wait of the host between microbatches, the fused end."""

import contextlib
import warnings

import pytest
import torch
from testing import SIZES, LiveBytes, make_batch, make_plan
from testing.laid import whole_parameters
from testing.peaks import kept_bytes
from transformers import AutoModelForCausalLM, LlamaConfig

from lengthwise.attention import AttentionNeeds, choose_kernel
from lengthwise.comm import Mesh, SoloTransport
from lengthwise.config import OptimizerConfig
from lengthwise.core.plan import Piece
from lengthwise.engine.optimizer import sliced_optimizer
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import wrapped_layers
from lengthwise.models.adapter import ATTENTION_NAME, register_attention
from tiers import more

LENGTHS = (300, 128, 1, 40, 129, 64)


def make(device, dtype, *, hidden=128, fused=None, offload=False):
    register_attention()
    config = LlamaConfig(**{**SIZES, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 3})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.float32).train()
    exact_on = torch.device("cpu") if offload else None
    options = {"dtype": dtype, "device": device, "layers": wrapped_layers(model), "exact_on": exact_on}
    flat = whole_parameters(model, SoloTransport(), **options)
    # A large eps: where a gradient is next to nothing, AdamW else makes a whole update of its rounding.
    config = OptimizerConfig(offload=offload, eps=1e-4)
    return model, flat, sliced_optimizer(config, model, flat, 0, fused=fused)


def run(model, flat, device, dtype, *, name="step"):
    kernel = choose_kernel(device, AttentionNeeds(dtype=dtype, head_dim=model.config.head_dim))
    plan = make_plan(1, LENGTHS, [[Piece(ranks=(0,), sequences=each)] for each in ((0,), (1, 2), (3, 4, 5))])
    context = StepContext(model, Mesh(SoloTransport(), 1), kernel, name=name, parameters=flat)
    return run_part(plan, make_batch(LENGTHS, vocab=48), context)


@contextlib.contextmanager
def telling_waits(device, told):
    """Append what torch says of every wait of the host for the device; on the CPU there is none to tell of."""
    if device.type == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        told += [str(each.message) for each in caught if "synchron" in str(each.message).lower()]
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.exhaustive  # on the CPU there is no wait to tell of
def test_gpu_host_waits_once_for_the_microbatches_of_a_step(device):
    dtype = torch.bfloat16
    model, flat, optimizer = make(device, dtype)
    run(model, flat, device, dtype, name="warm-up")
    optimizer.end_step(1e-3, SoloTransport(), limit=0.1)
    told = []
    with telling_waits(device, told):
        run(model, flat, device, dtype)
    assert len(told) <= 1, told  # where the sum of the losses is read


def test_gpu_start_holds_what_is_kept_and_no_more(device):
    """In what the allocator gave at most, where there is one; the model itself stays in host memory until taken."""
    dtype = torch.bfloat16
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model, flat, _ = make(device, dtype, hidden=512)
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with LiveBytes() as live:
            model, flat, _ = make(device, dtype, hidden=512)
        peak = live.now_bytes
    kept = kept_bytes(model, flat, OptimizerConfig())
    buffers = 5  # gradients, values, masters, two moments: the allocator leaves up to 1 MiB beside each large one
    assert kept <= peak <= 1.01 * kept + (buffers << 20)


@pytest.mark.parametrize(("fused", "offload"), [(None, True), more(False, False), more(True, False)])
def test_gpu_updates_are_those_of_the_cpu(device, fused, offload):
    found = []
    for where, own, away in ((torch.device("cpu"), False, False), (device, fused, offload)):
        model, flat, optimizer = make(where, torch.float32, fused=own, offload=away)
        for step in range(3):
            run(model, flat, where, torch.float32, name=f"step {step}")
            optimizer.end_step(1e-2, SoloTransport(), limit=0.1)
        found.append(flat.master_weights.cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=2e-5)
