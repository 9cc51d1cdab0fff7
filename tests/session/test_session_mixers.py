"""Hybrid models train in a session as in the plain loop: whole, sharded, in stages, with LoRA, with shared prompts."""

import warnings
from functools import partial

import pytest
import torch
from loops import VOCAB, both_loops, in_double, in_ranks, rows_of
from peft import LoraConfig, get_peft_model
from testing.families import enliven
from testing.tiny import tiny_family_config
from transformers import AutoModelForCausalLM

from lengthwise.session.model import can_share_prefixes
from tiers import more

SGD = partial(torch.optim.SGD, lr=0.05)
PROMPT = {"input_ids": torch.arange(20), "labels": torch.full((20,), -100)}
ANSWERS = [{name: torch.cat([PROMPT[name], x]) for name, x in row.items()} for row in rows_of([30, 9, 24], 1)]
STEPS = [rows_of([97, 13], 0), ANSWERS]
IN_PARTS = ["in_proj_qkv", "in_proj", "q_proj"]  # of Mamba layers peft takes no out_proj


def hybrid(family, *, lora):
    torch.manual_seed(0)
    how = {"attn_implementation": "sdpa", "experts_implementation": "eager", "dtype": torch.float64}
    model = enliven(AutoModelForCausalLM.from_config(tiny_family_config(family, {"vocab_size": VOCAB}), **how))
    if lora:
        config = LoraConfig(r=4, target_modules=IN_PARTS, init_lora_weights=False, task_type="CAUSAL_LM")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft asks transformers by an old name
            model = get_peft_model(model, config, autocast_adapter_dtype=False)
    return model.double().train()  # some routers stay in fp32


@pytest.mark.parametrize(
    ("family", "lora", "layout", "ranks"),
    [
        ("qwen3_5_text", True, {"shard": "zero3", "recompute": "layer"}, 2),
        *(
            more(family, True, {"shard": shard}, 2)
            for family in ("qwen3_5_text", "nemotron_h", "falcon_h1", "lfm2")
            for shard in ("zero1", "zero3")
        ),
        more("qwen3_5_text", False, {"stages": 2, "recompute": "layer"}, 4),
        more("lfm2", False, {"stages": 2}, 4),
        more("nemotron_h", True, {"stages": 2, "virtual": 2}, 4),
        more("falcon_h1", True, {"stages": 2}, 4),
        more("nemotron_h", False, {"shard": "hybrid", "ranks_per_node": 2}, 4),
    ],
)
def test_hybrid_models_train_as_in_the_plain_loop(family, lora, layout, ranks, tmp_path):
    def work(_rank):
        model = hybrid(family, lora=lora)
        assert can_share_prefixes(model)
        return both_loops(SGD, model=model, steps=STEPS, **layout)

    assert max(map(max, in_ranks(in_double(work), ranks, tmp_path))) < 1e-10
