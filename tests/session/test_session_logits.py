"""How many logits a step of a session makes at once, and what memory holds where a loss asks for all of them."""

from functools import partial

import pytest
import torch
from loops import LargestTensor, rows_of, small_model

from lengthwise import Session
from lengthwise.session import start

SGD = partial(torch.optim.SGD, lr=0.1)
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
    monkeypatch.setattr(start, "logits_at_once", lambda words, **_: 8 * words)


def test_no_step_of_a_session_makes_all_logits():
    model = small_model(torch.float32, vocab_size=WORDS)
    tokens, found = sum(len(row["input_ids"]) for row in ROWS), {}
    with Session(model, SGD(model.parameters()), capacity_tokens=256) as session:
        for name, run in STEPS.items():
            with LargestTensor() as largest:
                run(session)
            found[name] = largest.numbers
    assert max(found.values()) < tokens * WORDS / 2, found  # the largest is the sum of all gradients
