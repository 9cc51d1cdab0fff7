"""LoRA adapters: the same start everywhere, files that peft opens, and what is refused."""

import json
import re
from functools import cache, partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from testing import build_pair, tiny_family_config
from testing.laid import whole_parameters

from lengthwise.comm import SoloTransport
from lengthwise.config import LoraConfig
from lengthwise.core.errors import ConfigError, Problems
from lengthwise.models.adapter import plain_output
from lengthwise.models.double import keep_double
from lengthwise.models.lora import build_adapted, check_lora, save_adapter
from lengthwise.models.model_files import save_model
from lengthwise.models.model_source import build_model, find_model, plain_attention

peft = pytest.importorskip("peft", minversion="0.21")

# peft itself asks transformers for a property that is going out of use.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

FEW = LoraConfig(r=4, lora_alpha=6, target_modules=("q_proj", "v_proj"))
# Families, and what is adapted; "tied": input and output embedding share their weight. In qwen3_next the layers of a
# shared expert have names that peft takes for those of the experts in one parameter.
CASES = {
    "llama tied": LoraConfig(r=3, lora_alpha=5, use_rslora=True),
    "mixtral": LoraConfig(),
    "qwen3_next": LoraConfig(),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")

    @cache
    def folder(family):
        name, _, tied = family.partition(" ")
        config = tiny_family_config(name, {"tie_word_embeddings": bool(tied)})
        save_model(build_pair(name, config)["planned"], root / family)
        return root / family

    return folder


def trained(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def as_wide(model, dtype):
    """Cast parameters and, unlike `Module.to`, no buffers: RoPE frequencies are fp32 in every Hugging Face model."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def test_lora_starts_from_the_seed_and_as_the_base_model(folders):
    source = find_model(str(folders("llama")))
    before = torch.random.get_rng_state()
    first, second, other = (build_adapted(source, FEW, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(trained(first)) == 8
    assert all("lora" in name for name in trained(first))
    assert all(torch.equal(parameter, trained(second)[name]) for name, parameter in trained(first).items())
    assert not any(p.any() for name, p in trained(first).items() if "lora_B" in name)
    assert not any(torch.equal(p, trained(other)[name]) for name, p in trained(first).items() if "lora_A" in name)
    drawn = trained(build_adapted(source, FEW, seed=5, draws_both=True))
    assert all(parameter.any() for parameter in drawn.values())


@pytest.mark.parametrize("case", CASES)
def test_saved_adapter_opens_in_peft_and_merges_to_the_same_output(folders, tmp_path, case):
    source = find_model(str(folders(case)))
    model = build_adapted(source, CASES[case], seed=1, attention=plain_attention(source), draws_both=True)
    whole_parameters(model, SoloTransport(), dtype=torch.float64)  # parameters become views, as in training
    save_adapter(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    base = as_wide(build_model(source, seed=9, attention=plain_attention(source)), torch.float64)
    opened = peft.PeftModel.from_pretrained(base, tmp_path, autocast_adapter_dtype=False)
    assert opened.peft_config["default"].base_model_name_or_path == str(folders(case))
    ids = torch.arange(30)
    with torch.no_grad(), keep_double(torch.float64):
        want = plain_output(model, ids).logits
        assert torch.equal(plain_output(opened, ids).logits, want)
        merged = plain_output(opened.merge_and_unload(), ids).logits
    assert (merged - want).abs().max() <= 1e-12 * want.abs().max()


def test_lora_goes_on_from_an_adapter_of_peft_and_saves_it_again(folders, tmp_path):
    source = find_model(str(folders("llama")))
    config = peft.LoraConfig(r=4, target_modules="all-linear", use_rslora=True, init_lora_weights=False)
    base = build_model(source, seed=3, attention=plain_attention(source))
    reference = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    reference.save_pretrained(tmp_path / "a")
    want = {name.removeprefix("base_model.model."): p for name, p in trained(reference).items()}
    for folder, saved in (("a", "b"), ("b", "c")):
        lora = LoraConfig(adapter=tmp_path / folder)
        check_lora(source, lora)
        again = build_adapted(source, lora, seed=8)
        got = trained(again)
        assert got.keys() == want.keys()
        assert all(torch.equal(p, want[name]) for name, p in got.items())
        save_adapter(again, tmp_path / saved)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "c" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("family", "names", "told"),
    [
        ("llama", ("q_prj", "k_prj", "v_proj"), "`k_prj`. Did you mean"),  # both are named
        ("llama", ("mlp",), "`mlp`, a LlamaMLP"),
        ("llama tied", ("lm_head",), "`lm_head`, whose weight input and output share"),
        ("mixtral", ("experts",), "`experts`, a MixtralExperts"),
        ("qwen3_next", ("q_proj", "gate_proj", "up_proj"), "got the experts of a mixture"),
        (None, ("q_proj",), "weights are drawn from the seed"),
    ],
)
def test_lora_refuses_targets_that_it_cannot_adapt(folders, family, names, told):
    source = find_model(str(folders(family)) if family else "tiny")
    with pytest.raises((ConfigError, Problems), match=re.escape(told)):
        check_lora(source, LoraConfig(target_modules=names))


CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def edit(folder, **changes):
    text = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(json.dumps({**json.loads(text), **changes}))


def tensors(folder, change):
    state = load_file(folder / TENSORS)
    change(state, min(state))
    save_file(state, folder / TENSORS)


EMBEDDING = "base_model.model.model.embed_tokens.base_layer.weight"


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: (folder / CONFIG).write_text("{"), CONFIG),
        (lambda folder: (folder / TENSORS).write_bytes(b"x" * 20), TENSORS),
        (partial(edit, peft_type="IA3"), "IA3"),
        (partial(edit, use_dora=True), "use_dora=True"),
        (partial(edit, some_new_trick=3), "some_new_trick=3"),
        (partial(edit, r=10**12), "at most 65536 for r in adapter_config.json; got 1000000000000"),
        (partial(edit, r=5), "lora_A.weight: [4, 32] in the file, [5, 32] in the model"),
        (partial(edit, target_modules=["nothing"]), "lora.adapter"),
        (partial(tensors, change=lambda state, name: state.update({name: state[name].long()})), "BF16; got "),
        (partial(tensors, change=lambda state, name: state.pop(name)), "nothing in the file"),
        # As peft saves an adapter of which an embedding is a target.
        (partial(tensors, change=lambda state, _: state.update({EMBEDDING: torch.zeros(48, 32)})), "save_embedding_"),
    ],
)
def test_lora_refuses_an_adapter_that_it_cannot_go_on_from(folders, tmp_path, spoil, told):
    save_adapter(build_adapted(find_model(str(folders("llama"))), FEW, seed=1), tmp_path / "adapter")
    spoil(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        check_lora(find_model(str(folders("llama"))), LoraConfig(adapter=tmp_path / "adapter"))
    assert caught.value.where == "lora.adapter"
