"""Sessions whose parameters or layers lie over the ranks: what is saved is whole, what cannot be is refused by name."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from loops import SGD, in_double, in_ranks, said
from testing.small import small_model, steps_of
from testing.tiny import tiny_family_config
from transformers import AutoModelForCausalLM

from lengthwise import Session
from lengthwise.comm import SoloTransport
from lengthwise.core.errors import LengthwiseError, ModelRefused
from lengthwise.cost import analytic_cost, named_hardware, named_shape
from lengthwise.session.stages import cut_stages

LAYERS = {"num_hidden_layers": 4}


pytestmark = pytest.mark.usefixtures("checked_transfers")


def test_layers_are_cut_by_what_each_of_them_takes():
    kinds = ["full_attention", "linear_attention", "linear_attention", *["mlp"] * 5]
    config = tiny_family_config("nemotron_h", {"layer_types": kinds, "vocab_size": 8})
    cut = cut_stages(SoloTransport(), config, 2, [64], capacity=64, cost=None)
    assert cut == [range(3), range(3, 8)]
    four, cost = tiny_family_config("llama", LAYERS), analytic_cost(named_shape("tiny"), named_hardware("cpu"))
    for head, first in ((0.0, 2), (0.5, 3)):  # a share of the linear work, as measured
        own = replace(cost, head_seconds=head * cost.linear_seconds)
        assert cut_stages(SoloTransport(), four, 2, [64], capacity=64, cost=own) == [range(first), range(first, 4)]


def share_a_weight(model):
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight


def share_a_buffer(model):
    for layer in model.model.layers:
        layer.scale = model.model.rotary_emb  # has buffers alone


def test_layers_that_stages_would_have_as_copies_are_refused_by_name_and_so_are_models_that_differ(tmp_path):
    def work(rank):
        for share in (share_a_weight, share_a_buffer):
            model = small_model(**LAYERS)
            share(model)
            words = r"got model\.layers\.\d\.\S+ on stage 0, which model\.layers\.[23]\."
            with pytest.raises(ModelRefused, match=words):
                Session(model, SGD(model.parameters()), capacity_tokens=64, stages=2)
        model = small_model(**LAYERS)
        model.model.layers[1].mlp = model.model.layers[0].mlp  # on the same stage
        Session(model, SGD(model.parameters()), capacity_tokens=64, stages=2).close()
        model = small_model(**LAYERS)
        with torch.no_grad():
            model.model.layers[3].mlp.up_proj.weight[0, 0] += rank
        with pytest.raises(LengthwiseError, match="got models that differ"):
            Session(model, SGD(model.parameters()), capacity_tokens=64, stages=2)

    in_ranks(work, 2, tmp_path)


def test_a_stage_gives_no_part_of_a_model_as_if_it_were_whole(tmp_path):
    def work(_rank):
        model = small_model(**LAYERS)
        with Session(model, SGD(model.parameters()), capacity_tokens=64, stages=2) as session:
            for call, words in (
                (partial(model.save_pretrained, tmp_path / "half"), "lie over the ranks"),
                (model.state_dict, "lie over the ranks"),
                (partial(model, input_ids=torch.tensor([[1, 2]])), "model in stages"),
                (partial(copy.deepcopy, model), "no copy of a sharded model"),
                (session.whole, "layers are on several ranks"),
            ):
                assert words in said(call)
            session.save_pretrained(tmp_path / "whole")

    in_ranks(work, 2, tmp_path)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not info["missing_keys"]


def test_a_whole_model_is_saved_and_what_needs_one_is_refused_at_once(tmp_path):
    def work(rank):
        model = small_model(tie_word_embeddings=True)
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        prompt, rows = torch.tensor([[1, 2, 3]]), steps_of()[0]
        with Session(model, SGD(model.parameters()), capacity_tokens=64, shard="zero3") as session:
            calls = [
                partial(model.generate, prompt, max_new_tokens=1),
                partial(model.model, prompt),
                model.state_dict,
                partial(model.load_state_dict, before),
                partial(model.save_pretrained, tmp_path / "alone"),
            ]
            with session.whole():  # ranks run it alone, one more often than the other
                made = model.generate(prompt, max_new_tokens=2 + rank, do_sample=False)
            with session.whole(on_first=True):
                for name, each in model.named_parameters():
                    assert each.is_meta if rank else torch.equal(each, before[name])
            if rank == 1:  # on one rank: it waits for nobody
                told = [said(call, ModelRefused) for call in calls]
                assert ["outside of a step" in each for each in told] == [True, True, False, False, False]
                assert all("lie over the ranks" in each for each in told)
            session.save_pretrained(tmp_path / "model")
            loss = session.evaluate(rows).loss
            assert "parameters that another session has sharded" in said(lambda: Session(model))
        assert "parameters that another session has sharded" in said(lambda: Session(model, SGD(model.parameters())))
        other = small_model(tie_word_embeddings=True)
        if rank:  # values and buffers are those of rank 0
            with torch.device("meta"):
                other = AutoModelForCausalLM.from_config(other.config, dtype=torch.float64)
        with Session(other, capacity_tokens=64, shard="zero3", device="cpu") as frozen:
            assert frozen.evaluate(rows).loss == loss
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
        assert torch.equal(made, opened.generate(prompt, max_new_tokens=2 + rank, do_sample=False))
        assert all(torch.equal(each, before[name]) for name, each in opened.named_parameters())

    in_ranks(in_double(work), 2, tmp_path)
