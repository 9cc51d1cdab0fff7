"""Calls of Python functions in a microbatch: on a GPU the host of a small model does little else.

What plain Hugging Face calls for the same layers, and torch to run them again, is left out.
"""

import gc
import sys
from dataclasses import replace

import pytest
import torch
from testing import make_batch, make_plan, tiny_family_config
from testing.laid import freed_parameters
from transformers import AutoModelForCausalLM

from engine.sharded_runs import OneOfSame
from lengthwise.attention import FlashCpuKernel
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.comm import Mesh, SoloTransport
from lengthwise.core.plan import Piece
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models.adapter import ATTENTION_NAME, register_attention

TOKENS, VOCAB, LAYERS = 12, 48, (1, 3)


class OneDocument:
    """Varlen calls of one document, by the CPU's kernel."""

    name, caps_scores = "one document", False

    def __init__(self):
        self._kernel = FlashCpuKernel()

    def forward(self, block, _documents):
        return self._kernel.forward(block)

    def backward(self, grad_out, block, saved, _documents):
        return self._kernel.backward(grad_out, block, saved)


def calls_of(run):
    """Count the calls of Python functions while `run` runs, a second time; none of them ends other tests' objects."""
    run()
    calls = 0
    gc.collect()
    gc.disable()

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def model_of(layers, attention):
    register_attention()
    config = tiny_family_config("llama", {"num_hidden_layers": layers})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def plain_calls(layers, recompute):
    model = model_of(layers, "sdpa")
    if recompute == "layer":
        model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    ids, positions = torch.arange(TOKENS)[None], torch.arange(TOKENS)[None]
    return calls_of(lambda: model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss.backward())


def planned_calls(layers, recompute, kernel, *, is_freed=False):
    """Count those of one more microbatch; of parameters that lie over two ranks where it `is_freed`."""
    model, found = model_of(layers, ATTENTION_NAME), []
    if is_freed:
        freed_parameters(model, OneOfSame(0, 2), dtype=torch.float32)
    for number in (1, 2):
        plan = make_plan(1, [TOKENS] * number, [[Piece(ranks=(0,), sequences=(i,))] for i in range(number)])
        plan = replace(plan, microbatches=tuple(replace(each, recompute=recompute) for each in plan.microbatches))
        context = StepContext(model, Mesh(SoloTransport(), 1), kernel, name="step")
        batch = make_batch([TOKENS] * number, vocab=VOCAB)
        found.append(calls_of(lambda plan=plan, batch=batch, context=context: run_part(plan, batch, context)))
    return found[1] - found[0]


@pytest.mark.parametrize(
    ("kernel", "recompute", "is_freed", "of_layer", "beside"),
    [
        (FlashCpuKernel(), "none", False, 80, 430),
        (FlashCpuKernel(), "layer", False, 118, 450),
        (VarlenKernel(OneDocument(), token_multiple=1), "none", False, 92, 470),
        (FlashCpuKernel(), "none", True, 125, 490),
    ],
    ids=["block by block", "block by block, layers again", "packs", "parameters over ranks"],
)
def test_a_microbatch_makes_few_calls(kernel, recompute, is_freed, of_layer, beside):
    """More than a limit is no defect by itself: it shows what a change costs every layer of every microbatch."""
    few, many = LAYERS
    planned = {each: planned_calls(each, recompute, kernel, is_freed=is_freed) for each in LAYERS}
    ours = {each: calls - plain_calls(each, recompute) for each, calls in planned.items()}
    a_layer = (ours[many] - ours[few]) / (many - few)
    assert 0 < a_layer <= of_layer
    assert ours[few] - few * a_layer <= beside
