"""Adapters on a base of bitsandbytes in 4 or 8 bits train as in the plain loop; what cannot be had is refused."""

from functools import partial

import pytest
import torch
from loops import both_loops, in_ranks
from peft import LoraConfig, PeftModel, get_peft_model
from testing.small import rows_of, write_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils.logging import disable_progress_bar

from lengthwise import Session
from lengthwise.core.errors import LengthwiseError
from lengthwise.models.quantized import layers_of
from tiers import more

pytest.importorskip("bitsandbytes")
disable_progress_bar()
# peft itself asks transformers for a property that is going out of use.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SGD = partial(torch.optim.SGD, lr=0.05)
STEPS = [rows_of([97, 13], 0)]
PROMPT = torch.arange(40) % 7
ANSWERS = [  # to one prompt, which is computed once
    {"input_ids": torch.cat([PROMPT, each]), "labels": torch.cat([torch.full((40,), -100), each])}
    for each in (torch.arange(number + 3) % 11 + 9 for number in range(8))
]
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
FP4 = BitsAndBytesConfig(load_in_4bit=True)
INT8 = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)


def quantized_model(folder, how, rank=0):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=torch.float32)
    adapters = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(rank)  # rank 0's adapters count
        return get_peft_model(model, adapters).train()


def base_of(model):
    return {name: each.clone() for name, each in model.state_dict().items() if "lora" not in name}


@pytest.mark.parametrize(
    ("how", "ranks", "options"),
    [
        (NF4, 2, {"capacity": 64}),
        more(INT8, 2, {"recompute": "layer"}),
        more(FP4, 1, {"recompute": "layer", "capacity": 128}),
        more(NF4, 2, {"capacity": 128, "offload": {"ratio": 0.5, "store": "disk", "path": "/tmp"}, "steps": [ANSWERS]}),
    ],
)
def test_adapters_train_as_in_the_plain_loop(tmp_path, how, ranks, options):
    """The longest row is cut over the ranks. Ranks but 0 begin with other scales, and get those of rank 0."""
    folder = write_model(tmp_path / "model", num_hidden_layers=3)

    def work(rank):
        model = quantized_model(folder, how, rank)
        before = base_of(model)
        for layer in layers_of(model) if rank else ():
            scales = layer.weight.SCB if how is INT8 else layer.weight.quant_state.absmax
            scales.zero_()
        found = both_loops(SGD, dtype=torch.float32, model=model, **{"steps": STEPS, **options})
        after = base_of(model)
        return found, all(torch.equal(after[name], each) for name, each in before.items())

    found = in_ranks(work, ranks, tmp_path)
    assert max(found[0][0]) < 2e-5
    assert all(kept for _, kept in found)


def test_a_quantized_base_counts_its_bytes(tmp_path):
    model = quantized_model(write_model(tmp_path), NF4)
    adapters = [each for each in model.parameters() if each.requires_grad]
    with Session(model, SGD(adapters), capacity_tokens=64) as session:
        trained = session.settings.trained
    state = model.get_base_model().state_dict()
    held = sum(each.nbytes for name, each in state.items() if "lora" not in name and "quant_" not in name)
    assert trained.frozen_bytes == pytest.approx(held, rel=0.01)


def test_adapters_of_a_quantized_base_merge_into_the_same_base_unquantized(tmp_path):
    folder, plain = write_model(tmp_path / "model"), partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    model = quantized_model(folder, NF4)
    optimizer = SGD([each for each in model.parameters() if each.requires_grad])
    with Session(model, optimizer, capacity_tokens=128) as session:
        session.backward(STEPS[0])
        optimizer.step()
        session.save_pretrained(tmp_path / "adapters")
    merged = PeftModel.from_pretrained(plain(folder), tmp_path / "adapters").merge_and_unload().state_dict()
    deltas = {name: each.get_delta_weight("default") for name, each in model.named_modules() if hasattr(each, "lora_A")}
    assert deltas
    base = plain(folder).state_dict()
    for name, delta in deltas.items():
        weight = name.removeprefix("base_model.model.") + ".weight"
        assert torch.allclose(merged[weight], base[weight] + delta, atol=1e-6)


@pytest.mark.parametrize(
    ("how", "options", "dtype", "words"),
    [
        (NF4, {"shard": "zero3"}, torch.float32, "several weights share a byte"),
        (BitsAndBytesConfig(load_in_8bit=True), {}, torch.float32, "llm_int8_threshold=6.0"),
        (NF4, {}, torch.float64, "fp32 at most"),
    ],
)
def test_what_a_quantized_base_cannot_have_is_refused(tmp_path, how, options, dtype, words):
    model = quantized_model(write_model(tmp_path), how)
    adapters = [each for each in model.parameters() if each.requires_grad]
    for each in adapters:
        each.data = each.data.to(dtype)
    with pytest.raises(LengthwiseError, match=words):
        Session(model, SGD(adapters), **options)
