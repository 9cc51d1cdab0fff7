"""A session's step on tensors without values, with the calls of a GPU: it waits for the device where it must."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from testing import SIZES
from testing.on_meta import META, device_without_values
from transformers import AutoModelForCausalLM, LlamaConfig

from lengthwise import Session
from lengthwise.session import open as session_open
from tiers import more

LENGTHS = (300, 40, 200, 7)
FORWARD = ["copy to the host: step.run_part", "event: clock._seconds_between"]
NORM = ["number: norm.gradient_norm"]
EDITS = "copy to the host: slices._take_to_host"  # whether there are some, and those, as without values there are
OF_CHECK = "copy to the host: loss_checks._numbers"
ON_HOST = [EDITS, EDITS, "copy to the host: optimizer._bring_gradients"]  # the last of gradients


def summed(output, tokens):
    return F.cross_entropy(output.logits[0].float(), tokens.shift_labels, reduction="sum")


BY_SEQUENCE = [*FORWARD, "number: values.combined", *FORWARD]
LOSSES = {
    "next token": (lambda session, rows: session.backward(rows), FORWARD),
    "own": (lambda session, rows: session.backward(rows, loss=summed), [*FORWARD, OF_CHECK]),
    "by sequence": (lambda session, rows: session.backward_by_sequence(rows, combine=torch.mean), BY_SEQUENCE),
}


def on_meta(model, optimizer, asked, **how):
    """Return the settings of a GPU, for the meta device in its place."""
    return replace(check_settings(model, optimizer, {**asked, "device": "cuda:0"}, **how), device=META)


check_settings = session_open.check_settings


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("next token", {"recompute": "layer"}),
        more("own", {"precision": "bf16"}),
        more("by sequence", {"offload_optimizer": True}),
    ],
)
def test_a_step_of_a_session_waits_for_its_device_where_it_must(monkeypatch, loss, options):
    backward, expected = LOSSES[loss]
    with META:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).train()
    rows = [{"input_ids": torch.arange(length) % SIZES["vocab_size"]} for length in LENGTHS]
    monkeypatch.setattr(session_open, "check_settings", on_meta)
    with device_without_values() as waits:
        optimizer = torch.optim.AdamW(model.parameters(), fused="offload_optimizer" not in options)
        with Session(model, optimizer, capacity_tokens=512, **options) as session:
            for _ in range(2):  # the first looks for what it keeps from then on
                waits.take()
                backward(session, rows)
                found = waits.take()
                session.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
    assert found == [*expected, *NORM]
    assert waits.found == [*NORM, *(ON_HOST if "offload_optimizer" in options else [])]
