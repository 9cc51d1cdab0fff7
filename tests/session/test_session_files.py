"""What a session saves: whole or not there, the same on any number of ranks, and refused where it is not what was."""

from functools import partial

import pytest
import torch
from loops import in_ranks, planned_loop, small_model, steps_of
from transformers import AutoModelForCausalLM

from lengthwise import Session
from lengthwise.core.errors import LengthwiseError, OutputError
from lengthwise.models import keep_double
from lengthwise.session.saving import MODEL, REST, TENSORS

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
CONSTANT = partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0)


def run(steps, *, loads=None, saves=None, capacity=64, dtype=torch.float64):
    """Train a small model over the steps; return its weights."""
    model = small_model(dtype)
    optimizer = ADAMW(model.parameters())
    with keep_double(torch.float64), Session(model, optimizer, capacity_tokens=capacity) as session:
        if loads is not None:
            session.load(loads)
        planned_loop(session, optimizer, CONSTANT(optimizer), steps)
        if saves is not None:
            session.save(saves)
    return [each.detach().clone() for each in model.parameters()]


def test_a_loop_goes_on_from_a_folder_at_any_number_of_ranks(tmp_path):
    steps, folder = steps_of(), tmp_path / "deep" / "step2"
    in_ranks(lambda _rank: run(steps[:2], saves=folder), 2, tmp_path)
    assert {each.name for each in folder.iterdir()} == {MODEL, TENSORS, REST}
    (end, *_) = in_ranks(lambda _rank: run(steps), 2, tmp_path)
    for ranks in (1, 2, 3):
        found = in_ranks(
            lambda _rank, ranks=ranks: run(steps[2:], loads=folder, capacity=256 // ranks), ranks, tmp_path
        )
        differs = max(((a - b).norm() / b.norm()).item() for a, b in zip(found[0], end, strict=True))
        assert differs < 1e-11
    saved = AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype=torch.float64)
    again = in_ranks(lambda _rank: run([], loads=folder), 1, tmp_path)[0]
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), again, strict=True))


def test_masters_of_weights_in_bf16_are_kept(tmp_path):
    steps = steps_of()
    whole = run(steps, capacity=256, dtype=torch.bfloat16)
    run(steps[:2], saves=tmp_path / "half", capacity=256, dtype=torch.bfloat16)
    found = run(steps[2:], loads=tmp_path / "half", capacity=256, dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


def test_every_rank_hears_what_the_first_met(tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()

    def work(_rank):
        said = []
        for loads, saves in ((None, taken), (taken, None)):
            try:
                run(steps_of()[:1], loads=loads, saves=saves)
            except OutputError as error:
                said.append(str(error))
        return said

    for saving, loading in in_ranks(work, 2, tmp_path):
        assert "a new folder" in saving
        assert "what session.save wrote" in loading


def test_a_folder_that_is_not_what_was_written_is_refused_and_changes_nothing(tmp_path):
    folder = tmp_path / "saved"
    run(steps_of()[:1], saves=folder, capacity=256)
    good = {name: (folder / name).read_bytes() for name in (TENSORS, REST)}
    spoiled = [
        (TENSORS, good[TENSORS][:-1]),
        (TENSORS, good[TENSORS][:-1] + bytes([good[TENSORS][-1] ^ 1])),
        (REST, b"{}"),
        (REST, b"[]"),
        (REST, good[REST].replace(b'"format": 1', b'"format": 2')),
        (REST, good[REST].replace(b'"param_groups"', b'"groups"')),
    ]
    model = small_model()
    with Session(model, ADAMW(model.parameters()), capacity_tokens=256) as session:
        before = [each.detach().clone() for each in model.parameters()]
        for name, content in spoiled:
            (folder / name).write_bytes(content)
            with pytest.raises(LengthwiseError, match="expected"):
                session.load(folder)
            (folder / name).write_bytes(good[name])
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        session.load(folder)
        assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_what_a_killed_process_left_does_not_stand_in_the_way(tmp_path):
    unfinished = tmp_path / ".saved.unfinished"
    unfinished.mkdir()
    (unfinished / TENSORS).write_bytes(b"half")
    run(steps_of()[:1], saves=tmp_path / "saved", capacity=256)
    assert not unfinished.exists()


def test_a_model_is_saved_as_hugging_face_opens_it_and_a_path_that_is_a_file_is_refused_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")

    def work(_rank):
        model = small_model()
        with Session(model, capacity_tokens=64) as session:
            session.save_pretrained(tmp_path / "model")
            with pytest.raises(OutputError, match="expected a folder; got a file"):
                session.save_pretrained(tmp_path / "file")
        return [each.detach().clone() for each in model.parameters()]

    for weights in in_ranks(work, 2, tmp_path):
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
        assert all(map(torch.equal, opened.parameters(), weights))
