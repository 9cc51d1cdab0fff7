"""A session whose parameters lie over the ranks gives what the plain loop gives; what needs them whole is refused."""

from functools import partial

import pytest
import torch
from loops import in_double, in_ranks, planned_loop
from testing.small import plain_loop, small_model, steps_of
from transformers import AutoModelForCausalLM

from lengthwise import Session
from lengthwise.core.errors import ModelRefused

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CONSTANT = partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0)


def test_a_whole_model_is_saved_and_what_needs_one_is_refused_at_once(tmp_path):
    def work(rank):
        model = small_model(tie_word_embeddings=True)
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        said, prompt = [], torch.tensor([[1, 2, 3]])
        with Session(model, MOMENTUM(model.parameters()), capacity_tokens=64, shard="zero3") as session:
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
                sent = [
                    each.is_meta or bool(torch.equal(each, before[name])) for name, each in model.named_parameters()
                ]
                assert all(sent)
                assert all(each.is_meta == (rank == 1) for each in model.parameters())
            for call in calls if rank == 1 else ():  # on one rank: it waits for nobody
                with pytest.raises(ModelRefused) as caught:
                    call()
                said.append(str(caught.value))
            session.save_pretrained(tmp_path / "model")
            loss = session.evaluate(steps_of()[0]).loss
            with pytest.raises(ModelRefused, match="parameters that another session has sharded"):
                Session(model)
        with pytest.raises(ModelRefused, match="parameters that another session has sharded"):
            Session(model, MOMENTUM(model.parameters()))
        with Session(small_model(tie_word_embeddings=True), capacity_tokens=64, shard="zero3") as frozen:
            return before, said, loss, frozen.evaluate(steps_of()[0]).loss, made

    found = in_ranks(in_double(work), 2, tmp_path)
    before, _, loss, frozen, _ = found[0]
    assert loss == frozen == found[1][2]
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    for rank, (*_, made) in enumerate(found):
        prompt = torch.tensor([[1, 2, 3]])
        assert torch.equal(made, opened.generate(prompt, max_new_tokens=2 + rank, do_sample=False))
    assert all(torch.equal(each, before[name]) for name, each in opened.named_parameters())
    said = found[1][1]
    assert [each for each in said if "outside of a step" in each] == said[:2]
    assert all("lie over the ranks" in each for each in said)


@pytest.mark.exhaustive
def test_other_ranks_need_no_storage_of_their_own(tmp_path):
    """Their model may be on the meta device: values and buffers are those of rank 0."""

    def work(rank):
        model = small_model()
        if rank:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(model.config, dtype=torch.float64)
        optimizer = ADAMW(model.parameters())
        with Session(model.train(), optimizer, capacity_tokens=64, shard="zero3", device="cpu") as session:
            return planned_loop(session, optimizer, CONSTANT(optimizer), steps_of()[:2])

    def plain(_rank):
        model = small_model()
        optimizer = ADAMW(model.parameters())
        return plain_loop(model, optimizer, CONSTANT(optimizer), steps_of()[:2])

    expected = in_double(plain)(0)
    for found in in_ranks(in_double(work), 2, tmp_path):
        assert found == [pytest.approx(each, rel=1e-12) for each in expected]


@pytest.mark.exhaustive
def test_values_that_a_pass_has_left_gathered_are_out_of_reach(tmp_path):
    """Of a tied model the unit of embedding and head stays for a microbatch; what a loop wrote there would be lost."""

    def work(_rank):
        model = small_model(tie_word_embeddings=True)
        optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.1), steps_of([[20, 30]])[0]
        with Session(model, optimizer, capacity_tokens=64, shard="zero3") as session:
            for run in (session.backward, session.evaluate, session.token_values):
                run(rows)
                with pytest.raises(ModelRefused, match="data of a parameter"):
                    model.lm_head.weight.data.mul_(0.5)

    in_ranks(work, 2, tmp_path)
