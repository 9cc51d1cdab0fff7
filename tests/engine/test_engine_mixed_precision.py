"""Units under mixed precision: gathered in the dtype that autocast reads them in, with the bits of wide gathers."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from testing import make_plan, relative_error, run_ranks
from testing.laid import whole_parameters
from torch import nn

from engine.sharded_runs import CPU, KINDS, LENGTHS, WAVES_OF_NODES, OneOfSame, build, in_waves, run, shard
from lengthwise.core.plan import Piece
from lengthwise.models import wrapped_layers
from lengthwise.models.modules import cast_weights
from lengthwise.session.settings import check_settings
from tiers import more

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated")  # peft reads it
BF16, FP32 = torch.bfloat16, torch.float32
WAVES = [[Piece(ranks=(0, 1), sequences=(0,))], [Piece(ranks=(1,), sequences=(1, 2, 3, 4, 5))]]


def adapted(**kinds):
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **kinds)
    return get_peft_model(build("llama"), config, autocast_adapter_dtype=False).train()


def linear_weights(model):
    """Name the weights of linear layers in decoder layers, without adapters'."""
    named = ((name, each) for name, each in model.named_modules() if "layers" in name and "lora_" not in name)
    return {f"{name}.weight" for name, each in named if type(each) is nn.Linear}


MODELS = {"llama": build, "tied": partial(build, "qwen3", tie_word_embeddings=True), "lora": adapted}


def train(model, parameters, transport, plan):
    """Make two updates; return their gradients, the whole parameters, and entries gathered meanwhile, by dtype."""
    gathered, found, gather = Counter(), [], transport.all_gather_async

    def counting(output, source, **how):
        gathered[output.dtype] += output.numel()
        return gather(output, source, **how)

    transport.all_gather_async = counting
    for _ in range(2):
        run(model, parameters, transport, plan, dtype=FP32, autocast=BF16)
        parameters.reduce_gradients()
        found.append(parameters.gather_gradients())
        parameters.master_weights.sub_(parameters.grad_shard.to(parameters.master_weights), alpha=1e-2)
        parameters.publish()
        parameters.clear_gradients()
    with parameters.whole():
        found.append({name: each.detach().clone() for name, each in model.named_parameters()})
    return found, gathered


@pytest.mark.parametrize(
    ("name", "kind", "per_node", "exact_on"),
    [
        ("llama", "none", None, None),
        ("lora", "layer", None, None),
        ("tied", "layer", 2, CPU),
        more("llama", "elementwise", 2, None),
        *(more("tied", kind, None, None) for kind in KINDS),
    ],
)
def test_linear_layers_are_gathered_narrow_with_the_bits_of_wide_gathers(name, kind, per_node, exact_on):
    """Over two ranks a sum does not depend on their order."""
    ranks, waves = (4, WAVES_OF_NODES) if per_node else (2, WAVES)
    plan = in_waves(make_plan(ranks, LENGTHS, waves, layers=2), kind)
    model = MODELS[name]()
    narrow = sum(model.get_parameter(each).numel() for each in linear_weights(model))

    def work(transport, *, to):
        own = copy.deepcopy(model)
        if to == "zero1":
            return train(own, whole_parameters(own, transport, dtype=FP32), transport, plan)
        return train(own, shard(own, transport, FP32, per_node, exact_on, to), transport, plan)

    whole, wide, found = (run_ranks(partial(work, to=to), ranks) for to in ("zero1", None, BF16))
    for (ours, gathered), (others, before), (plain, _) in zip(found, wide, whole, strict=True):
        for got, want, exact in zip(ours, others, plain, strict=True):
            assert got.keys() == want.keys() == exact.keys()
            for each in want:
                assert got[each].dtype == FP32
                assert torch.equal(got[each], want[each]), each
                assert relative_error(got[each], exact[each], floor=1e-3) < 1e-5, each
        if per_node is None:  # otherwise a node gathers
            assert gathered[BF16] == 2 * 2 * len(waves) * narrow  # of two steps, before forward and backward
            assert gathered.total() == before.total()


def test_weights_that_an_adapter_may_read_otherwise_stay_wide():
    def cast(model):
        names = {id(each): name for name, each in model.named_parameters()}
        return {names[id(each)] for each in cast_weights(wrapped_layers(model))}

    for model in (build(), adapted()):
        assert cast(model) == linear_weights(model)
    assert cast(adapted(use_dora=True)) == {each for each in linear_weights(model) if "base_layer" not in each}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_estimates_count_the_bytes_that_are_gathered(family):
    """GPT-2 has no linear layers of torch, and experts in one parameter are gathered wide."""
    model = build(family)
    given = {"precision": "bf16", "capacity_tokens": 64}
    counted = check_settings(model, torch.optim.SGD(model.parameters()), given).trained.layer_bytes
    shard(model, OneOfSame(0, 2), FP32, casts_to=BF16)
    gathered = [each for layer in wrapped_layers(model) for each in layer.parameters()]
    entries = sum(each.numel() for each in gathered)
    assert counted == pytest.approx(sum(each.numel() * each.element_size() for each in gathered) / entries)
