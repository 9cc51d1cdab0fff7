"""Adapters of peft train as in the plain loop, under each layout, or are refused by name when the session is made."""

import warnings
from functools import partial

import peft
import pytest
import torch
from loops import both_loops, in_double, in_ranks
from peft import LoraConfig, get_peft_model
from testing.small import VOCAB, rows_of, small_model
from testing.tiny import tiny_family_config
from transformers import AutoModelForCausalLM

from lengthwise import Session
from lengthwise.core.errors import LengthwiseError, ModelRefused
from lengthwise.models import keep_double
from lengthwise.models.adapter_kinds import SAME_AS_PEFT
from tiers import more

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch, under SHIRA
SGD = partial(torch.optim.SGD, lr=0.05)
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


def experts(dtype):
    torch.manual_seed(0)
    config = tiny_family_config("qwen3_moe", {"vocab_size": VOCAB})
    how = {"attn_implementation": "sdpa", "experts_implementation": "eager", "dtype": dtype}
    return AutoModelForCausalLM.from_config(config, **how)


def adapted(config, dtype=torch.float64, *, base=small_model, **changes):
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's advice on its own kinds
        config = config() if callable(config) else config
        return get_peft_model(base(dtype, **changes), config, autocast_adapter_dtype=False).train()


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ({"shard": "zero3"}, ("rows of both",)),
        more({"shard": "zero1"}, tuple(CASES)),
        more({"shard": "zero3"}, tuple(CASES)),
    ],
)
def test_adapters_train_as_in_the_plain_loop(layout, names, tmp_path):
    def both(config, changes):
        model = adapted(config, **changes)  # some kinds start in fp32
        with keep_double(torch.float64):
            return both_loops(SGD, model=model, steps=STEPS, **layout)

    def work(_rank):
        return {name: both(*CASES[name]) for name in names}

    for found in in_ranks(work, 2, tmp_path):
        assert {name: each for name, each in found.items() if not max(each) < 1e-11} == {}


@pytest.mark.exhaustive
def test_adapters_of_experts_in_one_parameter_train_as_in_the_plain_loop(tmp_path):
    """Ranks run different numbers of forwards, in each of which peft swaps the parameter and puts it back."""
    config = LORA(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    steps = [rows_of([38, 37, 39], 0), rows_of([38], 1)]

    def work(rank):
        model = adapted(config, base=experts)
        if rank:
            with torch.no_grad():
                model(input_ids=torch.tensor([[1, 2]]))  # on one rank alone
        return both_loops(SGD, model=model, steps=steps, capacity=40, shard="zero1")

    assert max(map(max, in_ranks(in_double(work), 2, tmp_path))) < 1e-11


@pytest.mark.exhaustive
def test_adapters_that_know_no_fp64_train_as_in_the_plain_loop_to_the_rounding_of_fp32(tmp_path):
    def work(_rank):
        model = adapted(peft.FourierFTConfig(n_frequency=10, **QUERIES), torch.float32)
        return both_loops(SGD, model=model, steps=STEPS, dtype=torch.float32)

    assert max(map(max, in_ranks(work, 2, tmp_path))) < 1e-5


def test_the_kinds_that_pass_are_those_compared_here():
    assert {*KINDS, "FOURIERFT"} == SAME_AS_PEFT


@pytest.mark.parametrize(
    ("config", "said"),
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
def test_other_adapters_are_refused_by_name_before_anything_else(config, said):
    model = adapted(config, **TIED)
    optimizer = SGD([each for each in model.parameters() if each.requires_grad])
    with pytest.raises(LengthwiseError) as caught:
        Session(model, optimizer, capacity_tokens=64)
    assert said in str(caught.value)
    assert str(caught.value).count("error[") == 1


TWO = {torch.float32, torch.float64}


def in_two_dtypes(tied=False):
    """As peft makes them of a bf16 model: adapters in one dtype, whole modules in the base's; norms in fp32, too."""
    config = LORA(modules_to_save=["embed_tokens"], ensure_weight_tying=tied)
    model = adapted(config, tie_word_embeddings=tied)
    for name, each in model.named_parameters():
        if "lora_" in name or "layernorm" in name:
            each.data = each.data.float()
            each.requires_grad_(True)
    return model


@pytest.mark.parametrize(("ranks", "layout"), [more(2, {"shard": "zero1", "overlap": True}), (2, {"shard": "zero3"})])
def test_weights_in_two_dtypes_train_as_in_the_plain_loop(ranks, layout, tmp_path):
    """To the rounding of fp32, in which some weights compute; the others have fp64."""

    def work(_rank):
        return both_loops(SGD, model=model, steps=[rows_of([97, 13], 0)], **layout)

    model = in_two_dtypes(tied=True)
    assert {each.dtype for each in model.parameters() if each.requires_grad} == TWO
    assert max(map(max, in_ranks(work, ranks, tmp_path))) < 1e-6


def test_weights_of_which_ranks_have_other_dtypes_are_refused_and_single_rows_under_stages(tmp_path):
    """Weights lie in the order of their dtypes, so a rank would take another parameter's values."""

    def work(rank):
        model = small_model(torch.float32)
        norms = model.model.layers[0].input_layernorm, model.model.layers[1].input_layernorm
        norms[rank].to(torch.bfloat16)
        with pytest.raises(LengthwiseError, match="the same dtypes of trainable parameters on all ranks"):
            Session(model, SGD(model.parameters()), capacity_tokens=64)
        model = adapted(OF_LORA["rows"][0])
        optimizer = SGD([each for each in model.parameters() if each.requires_grad])
        with pytest.raises(ModelRefused, match="trainable_token_indices"):
            Session(model, optimizer, capacity_tokens=64, stages=2)

    in_ranks(work, 2, tmp_path)
