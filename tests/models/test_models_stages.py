"""Models cut into stages: every family that is accepted computes the same, the others are refused by name."""

import pytest
import torch
from testing.families import build_pair, tiny_model
from testing.pipelines import as_pipeline, pipeline_difference
from testing.plans import make_plan
from testing.small import write_model
from testing.tiny import VARIANTS, tiny_family_config
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel

from lengthwise.core.errors import ConfigError, ModelRefused
from lengthwise.core.plan import Piece
from lengthwise.models import FAMILIES, ModelStage
from lengthwise.models.model_stage import check_stages
from lengthwise.models.own_rows import OwnRows
from tiers import some

CASES = {**{family: (family, {}) for family in FAMILIES}, **VARIANTS}
REFUSED = {
    *("biogpt", "ctrl", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "gpt-sw3", "gpt2", "gpt_bigcode"),
    *("hrm_text", "longcat_flash", "nanochat", "olmo", "opt"),
}
ACCEPTED = [name for name in CASES if name not in REFUSED]
BY_DEFAULT = [ACCEPTED.index(name) for name in ("qwen3_moe, router loss", "falcon_h1")]


@pytest.mark.parametrize("name", some(ACCEPTED, *BY_DEFAULT))
def test_an_accepted_family_has_the_gradients_of_one_process_in_two_stages(name):
    family, changes = CASES[name]
    config = tiny_family_config(family, changes)
    check_stages(config)
    lengths = (17, 5, 3)
    rows = [Piece(ranks=(0, 1), sequences=(0,)), Piece(ranks=(1,), sequences=(1, 2))]
    found = pipeline_difference(build_pair(family, config), as_pipeline(make_plan(2, lengths, rows), 2), lengths)
    assert max(found.gradient, found.loss, found.router_loss) < 1e-12


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("gpt2", {}, "Embedding, Embedding"),
        ("gemma3n_text", {}, "num_kv_shared_layers"),
        ("qwen3_moe", {"output_router_logits": True, "mlp_only_layers": [1]}, "a last layer without a router"),
        ("phi", {"embd_pdrop": 0.1}, "dropout after the embedding"),
    ],
)
def test_a_model_that_is_more_than_its_layers_is_refused_by_name(family, changes, said):
    with pytest.raises(ModelRefused, match=rf"stages: model \w+.*{said}"):
        check_stages(tiny_family_config(family, changes))


def test_a_decoder_that_changes_what_its_layers_give_is_refused(monkeypatch):
    forward = LlamaModel.forward

    def changed(model, input_ids, **how):
        output = forward(model, input_ids, **how)
        output.last_hidden_state = output.last_hidden_state * 2.0
        return output

    monkeypatch.setattr(LlamaModel, "forward", changed)
    with pytest.raises(ModelRefused, match="changes hidden states after its first layer"):
        check_stages(tiny_family_config("llama"))


def test_a_stage_on_which_nothing_trains_is_refused_on_all_stages():
    for stage in (0, 1):
        model = tiny_model("llama").requires_grad_(False)
        model.model.layers[0].requires_grad_(True)
        with pytest.raises(ConfigError, match=r"none on stage 1 \(layers 1\)"):
            ModelStage(model, [range(1), range(1, 2)], stages=2, stage=stage)


@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_reads_its_own_weights_alone_and_all_stages_make_the_model_again(tmp_path, tied):
    folder = write_model(tmp_path / "model", num_hidden_layers=3, tie_word_embeddings=tied)
    whole = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    config, read, found = AutoConfig.from_pretrained(folder), 0, {}
    for number in (1, 0):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        first, rows = ModelStage(model, [range(2), range(2, 3)], stages=2, stage=number), OwnRows(folder)
        first.read_weights(rows)
        read += rows.num_bytes
        assert not any(each.is_meta for each in model.parameters())
        found |= {name: each for name, each in model.state_dict().items() if name in first.entries[number]}
    every = sum(each.nbytes for name, each in whole.items() if not (tied and name == "lm_head.weight"))
    assert read == every + (whole["lm_head.weight"].nbytes if tied else 0)  # a tied head is read on both ends
    with first.whole({name: each for name, each in found.items() if name in first.entries[1]}):
        made = {name: each.clone() for name, each in first.model.state_dict().items()}
    assert made.keys() == whole.keys()
    assert all(torch.equal(made[name], each) for name, each in whole.items())
    assert set(first.model.state_dict()) == set(first.entries[0])
