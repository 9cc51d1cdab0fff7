"""A model that a session reads, and an optimizer that it makes, train to the bits of a loop that gives both."""

import pytest
import torch
from testing.saved import whole_state
from testing.small import small_model, steps_of, write_model
from transformers import AutoModelForCausalLM

from lengthwise import StoredModel
from lengthwise.core.errors import LengthwiseError
from lengthwise.models.own_rows import OwnRows
from lengthwise.session import Session
from session.loops import in_ranks, same
from tiers import more

LR = 1e-2
SECTION = {"name": "adamw", "betas": [0.9, 0.99], "weight_decay": 0.1}


def given_model(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    decays = [each for each in model.parameters() if each.dim() >= 2]
    others = {"params": [each for each in model.parameters() if each.dim() < 2], "weight_decay": 0.0}
    how = {"lr": LR, "betas": (0.9, 0.99), "weight_decay": 0.1, "fused": True}
    return model, torch.optim.AdamW([{"params": decays}, others], **how)


def stored_model(folder):
    return StoredModel.of(str(folder), dtype="fp32"), SECTION


def trained(make, folder, options, *, loads=None, saves=None):
    """Make the steps up to the second, from a folder or the start; return losses, and rank 0's whole state."""
    model, optimizer = make(folder)
    with Session(model, optimizer, capacity_tokens=128, **options) as session:
        if loads is not None:
            session.load(loads)
        losses = []
        for rows in steps_of()[session.steps : 2]:
            losses.append(session.backward(rows).loss)
            session.clip_grad_norm_(1.0)
            if make is stored_model:
                session.optimizer.step(LR)  # which clears the gradients
            else:
                optimizer.step()
                optimizer.zero_grad()
            if saves is not None and session.steps == 1:
                session.save(saves)
        return losses, whole_state(session)


@pytest.mark.parametrize(
    ("options", "ranks"),
    [({"shard": "zero3"}, 2), more({"shard": "zero1"}, 3), more({"stages": 2}, 2), more({"shard": "zero1"}, 1)],
)
def test_what_a_session_reads_trains_to_the_bits_of_what_a_loop_gives(tmp_path, options, ranks):
    folder, saved = write_model(tmp_path / "model"), tmp_path / "saved"
    given = in_ranks(lambda _: trained(given_model, folder, options), ranks, tmp_path)
    read = in_ranks(lambda _: trained(stored_model, folder, options, saves=saved), ranks, tmp_path)
    assert same(read, given)
    (losses, state), *_ = in_ranks(lambda _: trained(stored_model, folder, {}, loads=saved), 1, tmp_path)
    assert losses == pytest.approx(given[0][0][1:], rel=1e-5)
    weights, others = state["master_weights"], given[0][1]["master_weights"]
    assert all(torch.allclose(weights[name], others[name], rtol=1e-4, atol=1e-5) for name in weights)


def test_under_zero3_every_rank_reads_its_own_rows(tmp_path, monkeypatch):
    folder, made = write_model(tmp_path / "model"), []
    monkeypatch.setattr(
        OwnRows, "__init__", lambda self, folder, init=OwnRows.__init__: made.append(self) or init(self, folder)
    )

    def work(_rank):
        trained(stored_model, folder, {"shard": "zero3"})
        return sum(each.num_bytes for each in made)

    size = sum(each.nbytes for each in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert all(0.4 * size < each < 0.6 * size for each in in_ranks(work, 2, tmp_path))


def test_a_stored_model_and_a_section_are_checked_in_words(tmp_path):
    stored = StoredModel.of(str(write_model(tmp_path / "model")))
    with pytest.raises(LengthwiseError) as caught:
        Session(stored, {"name": "adamww", "rate": 1}, capacity=64)
    for words in ("optimizer.name", "adamw", "optimizer.rate", "capacity_tokens"):
        assert words in str(caught.value)
    model = small_model(torch.float32)
    with pytest.raises(LengthwiseError, match="values of a run file's optimizer"):
        Session(stored, torch.optim.AdamW(model.parameters()), capacity_tokens=64)
