"""Adapters of peft train as in the plain loop, under each layout, or are refused by name when the session is made."""

import warnings
from functools import partial

import peft
import pytest
import torch
from loops import SGD, both_loops, in_ranks, said
from peft import LoraConfig, get_peft_model
from testing.small import rows_of, small_model

from lengthwise import Session
from lengthwise.models import keep_double
from lengthwise.models.adapter_kinds import SAME_AS_PEFT
from tiers import more

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch, under SHIRA
STEPS = [rows_of([97, 13], 0), rows_of([30, 9, 64], 1)]
LINEAR, TIED = ["q_proj", "down_proj"], {"tie_word_embeddings": True}
LORA = partial(LoraConfig, r=4, target_modules=LINEAR, init_lora_weights=False, task_type="CAUSAL_LM")

# Of LoRA and what it trains beside: a config, changes to the model.
OF_LORA = {
    "embedding": (LORA(target_modules=["embed_tokens", "q_proj"]), TIED),
    "head": (LORA(target_modules=["lm_head", "q_proj"]), {}),
    "tied head": (LORA(target_modules=["lm_head", "q_proj"]), TIED),
    "rows": (LORA(trainable_token_indices=[1, 5, 9]), TIED),
    "rows of both": (LORA(trainable_token_indices={"embed_tokens": [1, 5], "lm_head": [1, 7]}), {}),
    "whole ends": (LORA(modules_to_save=["embed_tokens", "lm_head"]), {}),
    "whole embedding, tied": (LORA(modules_to_save=["embed_tokens"]), TIED),
    "whole ends, tied": (LORA(modules_to_save=["embed_tokens"], ensure_weight_tying=True), TIED),
    "whole norm": (LORA(modules_to_save=["norm"]), {}),
    "DoRA": (LORA(use_dora=True, target_modules=["embed_tokens", "q_proj"]), {}),
    "rsLoRA, biases": (LORA(use_rslora=True, lora_bias=True, bias="all"), {}),
    "orthogonal": (LORA(init_lora_weights="orthogonal"), {}),
}
QUERIES = {"target_modules": ["q_proj"]}
NOT_ZERO = {"init_weights": False, "target_modules": LINEAR}
IA3 = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"], "init_ia3_weights": False}
KINDS = {
    **dict.fromkeys(("BEFT", "DEFT", "FROD", "GLORA", "PEANUT", "RANDLORA", "SUPERTUNING", "TINYLORA"), QUERIES),
    **dict.fromkeys(("UNILORA", "VERA"), QUERIES),
    **dict.fromkeys(("DELORA", "HIRA", "HRA", "LOHA", "LOKR"), NOT_ZERO),
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 1, "task_type": "CAUSAL_LM"},
    "BOFT": {"boft_block_size": 4, **NOT_ZERO},
    "C3A": {"block_size": 8, **QUERIES},
    "FOURIERFT": {"n_frequency": 10, **QUERIES},
    "GRALORA": {"r": 8, **NOT_ZERO},
    "IA3": IA3,
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "LORA": {"target_modules": LINEAR, "init_lora_weights": False},
    "MISS": {"r": 4, **QUERIES},
    "OFT": {"r": 0, "oft_block_size": 4, **NOT_ZERO},
    "ROAD": {"group_size": 8, **QUERIES},
    "SHIRA": {"r": 4, **QUERIES},
    "TRAINABLE_TOKENS": {"token_indices": [1, 5], "target_modules": ["embed_tokens"]},
    "VBLORA": {"num_vectors": 16, "vector_length": 4, **QUERIES},
    "WAVEFT": {"n_frequency": 10, **QUERIES},
}
CASES = {
    **OF_LORA,
    **{kind: (partial(peft.get_peft_config, {"peft_type": kind, **keys}), {}) for kind, keys in KINDS.items()},
}


def adapted(config, dtype=torch.float64, **changes):
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's advice on its own kinds
        config = config() if callable(config) else config
        return get_peft_model(small_model(dtype, **changes), config, autocast_adapter_dtype=False).train()


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ({"shard": "zero3"}, ("rows of both",)),
        more({"shard": "zero1"}, tuple(CASES)),
        more({"shard": "zero3"}, tuple(CASES)),
    ],
)
def test_adapters_train_as_in_the_plain_loop(layout, names, tmp_path):
    """To the rounding of fp32 for a kind that knows no fp64."""

    def both(name):
        config, changes = CASES[name]
        dtype = torch.float32 if name == "FOURIERFT" else torch.float64
        model = adapted(config, dtype, **changes)  # some kinds start in fp32
        with keep_double(dtype):
            return both_loops(SGD, model=model, steps=STEPS, dtype=dtype, **layout)

    def work(_rank):
        return {name: both(name) for name in names}

    for found in in_ranks(work, 2, tmp_path):
        bar = {"FOURIERFT": 1e-5}
        assert {name: each for name, each in found.items() if not max(each) < bar.get(name, 1e-11)} == {}


def test_the_kinds_that_pass_are_those_compared_here():
    assert {*KINDS} == SAME_AS_PEFT


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "PROMPT_TUNING (virtual tokens"),
        (peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "PREFIX_TUNING (virtual tokens"),
        (peft.AdaLoraConfig(total_step=10, target_modules=LINEAR), "ADALORA (a loss of its own"),
        (peft.LilyConfig(target_modules=["q_proj"]), "LILY (a router"),
        (LORA(alora_invocation_tokens=[1, 2]), "LORA with alora_invocation_tokens"),
        (LORA(layer_replication=[[0, 1], [0, 2]]), "LORA with layer_replication"),
        (LORA(target_modules=["embed_tokens"], ensure_weight_tying=True), "LORA with ensure_weight_tying"),
        (peft.LoHaConfig(rank_dropout=0.1, **NOT_ZERO), "LOHA with rank_dropout (random numbers"),
    ],
)
def test_other_adapters_are_refused_by_name_before_anything_else(config, words):
    model = adapted(config, **TIED)
    optimizer = SGD([each for each in model.parameters() if each.requires_grad])
    told = said(lambda: Session(model, optimizer, capacity_tokens=64))
    assert words in told
    assert told.count("error[") == 1


@pytest.mark.parametrize("layout", [more({"shard": "zero1", "overlap": True}), {"shard": "zero3"}])
def test_weights_in_two_dtypes_train_as_in_the_plain_loop(layout, tmp_path):
    """As peft makes them of a bf16 model: adapters in one dtype, whole modules in the base's; norms in fp32, too."""
    model = adapted(LORA(modules_to_save=["embed_tokens"], ensure_weight_tying=True), **TIED)
    for name, each in model.named_parameters():
        if "lora_" in name or "layernorm" in name:
            each.data = each.data.float()
            each.requires_grad_(True)
    assert len({each.dtype for each in model.parameters() if each.requires_grad}) == 2

    def work(_rank):
        return both_loops(SGD, model=model, steps=STEPS[:1], **layout)

    assert max(map(max, in_ranks(work, 2, tmp_path))) < 1e-6, "the rounding of fp32, in which some weights compute"


def test_weights_of_which_ranks_have_other_dtypes_are_refused_and_single_rows_under_stages(tmp_path):
    """Weights lie in the order of their dtypes, so a rank would take another parameter's values."""

    def work(rank):
        model = small_model(torch.float32)
        norms = model.model.layers[0].input_layernorm, model.model.layers[1].input_layernorm
        norms[rank].to(torch.bfloat16)
        told = said(lambda: Session(model, SGD(model.parameters()), capacity_tokens=64))
        assert "the same dtypes of trainable parameters on all ranks" in told
        rows = adapted(OF_LORA["rows"][0])
        optimizer = SGD([each for each in rows.parameters() if each.requires_grad])
        told = said(lambda: Session(rows, optimizer, capacity_tokens=64, stages=2))
        assert "trainable_token_indices" in told

    in_ranks(work, 2, tmp_path)
