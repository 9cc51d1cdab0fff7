"""How many logits a step of a session makes at once, and what memory holds where a loss asks for all of them."""

import re

import pytest
import torch
import torch.nn.functional as F
from loops import SGD, LargestTensor, in_ranks, said
from testing.small import rows_of, small_model

from lengthwise import Session
from lengthwise.core.held import fullest_tokens
from lengthwise.session import capacity as room
from lengthwise.session import engine

WORDS = 4096
ROWS = rows_of([150, 40, 3], 5)  # 202 tokens with the one that it adds
STEPS = {
    "backward": lambda session: session.backward(ROWS),
    "evaluate": lambda session: session.evaluate(ROWS),
    "token_values": lambda session: session.token_values(ROWS),
    "by sequence": lambda session: session.backward_by_sequence(ROWS, combine=lambda sums: sums.square().mean()),
    "by token": lambda session: session.backward_by_sequence(
        ROWS, combine=lambda values: torch.cat(values).square().sum(), per="token"
    ),
}


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch):
    """Let losses make the logits of eight tokens at once."""
    monkeypatch.setattr(engine, "logits_at_once", lambda words, **_: 8 * words)


def test_no_step_of_a_session_makes_all_logits():
    model = small_model(torch.float32, vocab_size=WORDS)
    tokens, found = sum(len(row["input_ids"]) for row in ROWS), {}
    with Session(model, SGD(model.parameters()), capacity_tokens=256) as session:
        for name, run in STEPS.items():
            with LargestTensor() as largest:
                run(session)
            found[name] = largest.numbers
    assert max(found.values()) < tokens * WORDS / 2, found  # the largest is the sum of all gradients


def by_position(_model, _given, named, output):
    weights = 1 + named["position_ids"][:, -output.logits.shape[1] :, None] % 7
    output.logits = output.logits * weights
    if (labels := named.get("labels")) is not None:
        output.loss = F.cross_entropy(output.logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum")
    return output


def test_logits_that_a_loop_makes_of_more_than_hidden_states_are_those_of_its_loss():
    model, plain = small_model(torch.float32), 0.0
    model.register_forward_hook(by_position, with_kwargs=True)
    for row in ROWS:
        ids = row["input_ids"][None]
        with torch.no_grad():
            logits = model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None]).logits[0]
        plain += F.cross_entropy(logits[:-1], row["labels"][1:], ignore_index=-100, reduction="sum").item()
    with Session(model, SGD(model.parameters()), capacity_tokens=256) as session:
        loss = session.backward(ROWS, normalizer=1.0).loss
        values = torch.cat(session.token_values(ROWS)).sum().item()
    assert (loss, -values) == (pytest.approx(plain, rel=1e-5), pytest.approx(plain, rel=1e-5))


def by_itself(output, tokens):
    return F.cross_entropy(output.logits[0], tokens.shift_labels, ignore_index=-100, reduction="sum")


def most_tokens(plan):
    """Return the tokens of the largest microbatch of a rank."""
    return max(fullest_tokens(plan, microbatch) for microbatch in plan.microbatches)


def test_a_loss_over_all_logits_gets_no_more_tokens_than_fit_with_them(monkeypatch, tmp_path, capfd):
    """Also in steps that were planned ahead for losses in chunks, of which a rank holds many times as many."""
    monkeypatch.setattr(room, "free_bytes", lambda *_: 12_000_000.0)

    def work(_rank):
        model = small_model(torch.float32, vocab_size=WORDS)
        rows = rows_of([250, 90, 120], 5)
        with Session(model, SGD(model.parameters()), recompute="none") as session:
            plain, in_chunks, found = session.evaluate(rows), session.capacity_tokens, []
            for step, loss in zip(session.batches([rows] * 2), [None, by_itself], strict=True):
                result = session.backward(step, loss=loss)
                session.optimizer.zero_grad()
                found.append((loss is not None, most_tokens(result.plan), result.loss))
            assert session.evaluate(step, loss=by_itself).loss == pytest.approx(plain.loss, rel=1e-5)
            return most_tokens(plain.plan), in_chunks, session.capacity_tokens, found, plain.loss

    for most, in_chunks, whole, found, loss in in_ranks(work, 2, tmp_path):
        assert whole < most <= in_chunks
        assert all(tokens <= whole for over_all, tokens, _ in found if over_all)
        assert [got for _, _, got in found] == pytest.approx([loss] * 2, rel=1e-5)
    told = capfd.readouterr().out
    assert re.search(r"holds [\d,]+ tokens.*\d+% of", told)
    assert told.count("lengthwise:") == 1, "rank 0 alone"


@pytest.mark.exhaustive
def test_a_loss_over_all_logits_that_do_not_fit_is_refused_and_others_run(monkeypatch):
    monkeypatch.setattr(room, "free_bytes", lambda *_: 3_000_000.0)
    model = small_model(torch.float32, vocab_size=WORDS)
    with Session(model, SGD(model.parameters()), recompute="none") as session:
        assert "all logits of 128 tokens" in said(lambda: session.backward(ROWS, loss=by_itself))
        assert session.backward(ROWS).loss > 0


def test_a_hook_or_another_call_on_one_rank_is_refused_on_all(tmp_path):
    def work(rank):
        model = small_model(torch.float32, vocab_size=WORDS)
        with Session(model, SGD(model.parameters()), capacity_tokens=128, timeout_seconds=20) as session:
            calls = (lambda: session.backward(ROWS), lambda: session.evaluate(ROWS), session.optimizer.step)
            for one, other in ((0, 1), (1, 2)):
                assert "expected the same call of the session on all ranks" in said(calls[other if rank else one])
            if rank:
                model.register_forward_hook(lambda *_: None)
            assert "expected the same kind of loss on all ranks" in said(lambda: session.backward(ROWS))

    in_ranks(work, 2, tmp_path)
