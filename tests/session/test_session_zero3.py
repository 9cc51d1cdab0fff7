"""A session whose parameters lie over the ranks gives what the plain loop gives; what needs them whole is refused."""

from functools import partial

import torch
from loops import SGD, in_double, in_ranks, said
from testing.small import small_model, steps_of
from transformers import AutoModelForCausalLM

from lengthwise import Session
from lengthwise.core.errors import ModelRefused


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
