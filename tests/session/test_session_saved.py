"""A session's state in a folder of slices: read by any number of ranks under any layout, or refused by all of them."""

import gc
import json
import os
import re
import shutil
import signal
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from testing.faults import VARIABLE
from testing.saved import whole_state
from testing.small import small_model, steps_of

from checkpoint.test_checkpoint_parts import flip
from lengthwise.checkpoint import export_state
from lengthwise.checkpoint.manifest import read_manifest, read_run_manifest, signed
from lengthwise.checkpoint.writer import WRITTEN
from lengthwise.core.errors import LengthwiseError
from lengthwise.session import Session, state_folder
from run.small_runs import call
from session.loops import ADAMW, CONSTANT, LargestTensor, in_double, in_ranks, planned_loop, said
from tiers import more, some

SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
ZERO1, ZERO3, HYBRID = ({"shard": "zero1"}, 2), ({"shard": "zero3"}, 3), ({"shard": "hybrid", "ranks_per_node": 2}, 4)
STAGES = ({"stages": 2}, 2)
UNREACHED = "model.norm.weight"
SMALLEST = partial(small_model, num_hidden_layers=1)
STEPS = steps_of([[1, 40, 3], [30, 33, 2]])


def tied():
    return small_model(tie_word_embeddings=True)


def groups_of(model, make):
    """Vectors without decay, and with another rate: groups in another order than the model's, with names."""
    named = list(model.named_parameters())
    vectors = {"params": [each for each in named if each[1].dim() < 2], "weight_decay": 0.0, "lr": 3e-3}
    return make([vectors, {"params": [each for each in named if each[1].dim() >= 2]}])


def opened(layout, make=ADAMW, model=None):
    model = tied() if model is None else model
    capacity = 64 if "stages" in layout else 32
    return Session(model, groups_of(model, make), capacity_tokens=capacity, **layout)


def step(session, rows):
    planned_loop(session, session.optimizer, CONSTANT(session.optimizer), [rows])


def run(folder, layout, ranks, make, *, loads=None, saves=None):
    """Make steps up to the second from a folder or the start; save after the first; return the state of rank 0."""

    def work(_rank):
        with opened(layout, make) as session:
            if loads is not None:
                session.load(loads)
                assert session.steps == 1
            for rows in STEPS[session.steps : 2]:
                step(session, rows)
                if saves is not None and session.steps == 1:
                    session.save(saves)
            return whole_state(session)

    return in_ranks(in_double(work), ranks, folder)[0]


def assert_same(found, wanted, tolerance):
    assert found["steps"] == wanted["steps"]
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    pairs = [(found["master_weights"], wanted["master_weights"])]
    for own, others in [*pairs, *((found["state"][number], each) for number, each in wanted["state"].items())]:
        assert own.keys() == others.keys()
        for name, expected in others.items():
            assert (own[name] - expected).norm() <= tolerance * expected.norm(), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return, by layout and optimizer, the folder that ranks saved after a step, and their state after one more."""
    made = {}

    def of(layout, ranks, make):
        key = (*layout, make)
        if key not in made:
            path = tmp_path_factory.mktemp("saved")
            made[key] = path / "state", run(path, layout, ranks, make, saves=path / "state")
        return made[key]

    return of


CASES = [
    (ADAMW, ZERO3, ZERO1),
    more(ADAMW, ZERO3, STAGES),
    more(SGD, ZERO3, HYBRID),
    more(SGD, STAGES, ZERO3),
    more(ADAMW, HYBRID, STAGES),
]


@pytest.mark.parametrize(("make", "first", "other"), CASES)
def test_training_goes_on_from_a_folder_on_other_ranks_under_other_layouts(make, first, other, saved, tmp_path):
    folder, wanted = saved(*first, make)
    assert_same(run(tmp_path, *other, make, loads=folder), wanted, 1e-12)


OTHERS = {
    "NAdam": (torch.optim.NAdam, {}),
    "on the host": (torch.optim.AdamW, {"offload_optimizer": True}),
    "centered RMSprop": (partial(torch.optim.RMSprop, centered=True, momentum=0.5), {}),
    "nothing": (torch.optim.SGD, {}),
}


@pytest.mark.parametrize("name", some(OTHERS))
def test_whatever_an_optimizer_keeps_is_kept_to_the_bit(name, tmp_path):
    make, options = OTHERS[name]
    found = []
    for loads in (False, True):
        with opened(options, make, small_model(torch.float32, num_hidden_layers=1)) as session:
            if loads:
                session.load(tmp_path / "state")
            for rows in steps_of([[9, 20], [31, 2]])[session.steps :]:
                step(session, rows)
                if session.steps == 1:
                    session.save(tmp_path / "state")
            found.append(whole_state(session))
    assert_same(found[1], found[0], 0.0)


def test_which_parameters_have_states_survives_and_no_rank_holds_more_than_its_slices(tmp_path):
    """Also where one of the ranks has no state at all of what others have."""
    folder = tmp_path / "state"

    def work(_rank):
        model = SMALLEST()
        with opened(ZERO3[0], model=model) as session:
            session.backward(STEPS[0])
            model.get_parameter(UNREACHED).grad = None
            session.optimizer.step()
            session.optimizer.zero_grad()
            with LargestTensor() as seen:
                session.save(folder)
            own, wanted, saving = session.engine.parameters.master_weights.nbytes, whole_state(session), seen.bytes
        with opened(ZERO3[0], model=SMALLEST()) as session:
            session.backward(STEPS[1])
            session.optimizer.step()  # these states go, also where the folder has none
            session.optimizer.zero_grad()
            with LargestTensor() as seen:
                session.load(folder)
            return wanted, whole_state(session), own, saving, seen.bytes

    found = in_ranks(in_double(work), 3, tmp_path)
    wanted, loaded, *_ = found[0]
    assert_same(loaded, wanted, 0.0)
    names = [name for name, each in SMALLEST().named_parameters() if each.dim() < 2]
    assert names.index(UNREACHED) not in wanted["state"]
    for *_, own, saving, loading in found:
        assert saving == loading == own


def edit(change):
    def edited(folder):
        path = folder / "manifest.json"
        values = json.loads(path.read_text())
        change(values)
        path.write_text(signed(values))

    return edited


def rename(values):
    values["parameters"][0]["name"] = "another"
    for group in values["optimizer"]["groups"]:
        group["params"] = ["another" if name == "model.embed_tokens.weight" else name for name in group["params"]]
    values["optimizer"]["states"]["another"] = values["optimizer"]["states"].pop("model.embed_tokens.weight")


DAMAGES = [
    (lambda folder: flip(folder / "rank-00001.safetensors", -1), r"SHA-256"),
    (lambda folder: (folder / "rank-00000.safetensors").unlink(), r"rank-00000\.safetensors.*No such file"),
    (lambda folder: (folder / "manifest.json").unlink(), r"no manifest\.json in it\. Name a folder that Session\.save"),
    (shutil.rmtree, r"no such folder\. Name a folder that Session\.save has written"),
    (edit(rename), r"model\.embed_tokens\.weight is missing"),
    (edit(lambda values: values["optimizer"]["groups"][0]["params"].append(UNREACHED)), r"groups of other parameters"),
    (edit(lambda values: values["optimizer"]["groups"][0].update(lr="fast")), r"groups, 0, lr: expected a finite"),
    (edit(lambda values: values["optimizer"]["states"][UNREACHED].pop("exp_avg")), rf"states of {UNREACHED}: expected"),
    (edit(lambda values: values["optimizer"]["states"][UNREACHED].update(step=-1.0)), r"step: expected a whole number"),
    (edit(lambda values: values.update(optimizer=None)), r"those of a run of an earlier version"),
]

OTHER_STATES = [  # of number 0, a vector
    (lambda state: state["param_groups"].pop(), r"its optimizer's groups: expected 2 of \d+, \d+ parameters; got 1 of"),
    (lambda state: state["state"][0].pop("exp_avg"), r"expected exp_avg, exp_avg_sq, step; got exp_avg_sq, step"),
    (lambda state: state["state"][0].update(exp_avg=torch.ones(3)), r"exp_avg of \S+: expected \(32,\).*; got \(3,\)"),
    (lambda state: state["state"][0]["exp_avg_sq"].neg_(), r"exp_avg_sq: .* got a tensor with a negative value"),
    (lambda state: state["state"].update({99: {"step": 1.0}}), r"states of parameter 99, which does not train"),
    (lambda state: state["master_weights"].popitem(), r"master_weights of \S+: expected \(.*; got nothing"),
    (lambda state: state.pop("state"), r"a plain optimizer; got KeyError: 'state'\. Name a file that"),
]


def test_what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(tmp_path):
    def save(_rank):
        with opened(ZERO1[0], model=SMALLEST()) as session:
            step(session, STEPS[0])
            session.save(tmp_path / "state")

    in_ranks(save, 2, tmp_path)
    with pytest.raises(LengthwiseError, match="expected a run's checkpoint; got a session's checkpoint"):
        read_run_manifest(tmp_path / "state")
    export_state(tmp_path / "state", tmp_path / "state.pt")
    for number, (damage, _) in enumerate(DAMAGES):
        shutil.copytree(tmp_path / "state", tmp_path / f"state-{number}")
        damage(tmp_path / f"state-{number}")
    for number, (change, _) in enumerate(OTHER_STATES, start=len(DAMAGES)):
        change(other := torch.load(tmp_path / "state.pt", weights_only=True))
        torch.save(other, tmp_path / f"state-{number}")
    cases = [*DAMAGES, *OTHER_STATES]

    def work(_rank):
        found = []
        with opened(ZERO3[0], model=SMALLEST()) as session:
            step(session, STEPS[1])
            before = whole_state(session)
            found += [said(partial(session.load, tmp_path / f"state-{number}")) for number in range(len(cases))]
            after = whole_state(session)
        for model, make in ((SMALLEST(), SGD), (SMALLEST(intermediate_size=40), ADAMW)):
            with opened(ZERO1[0], make, model) as session:
                found.append(said(partial(session.load, tmp_path / "state")))
        return found, before, after

    expected = [*(told for _, told in cases), "expected SGD; got AdamW", r"has shape \[\d+, 32\], not \[40, 32\]"]
    ranks = in_ranks(work, 2, tmp_path)
    for found, before, after in ranks:
        assert [told for told, text in zip(expected, found, strict=True) if not re.search(told, text)] == [], found
        if before:
            assert_same(after, before, 0.0)
    assert ranks[0][0] == ranks[1][0]


def test_other_folders_folders_of_other_things_and_weights_that_are_not_finite_are_refused(tmp_path):
    files = {"mine/thesis.txt": "mine", "page/manifest.json": '{"name": "mine"}'}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)

    def work(rank):
        model = SMALLEST()
        with opened(ZERO1[0], model=model) as session:
            assert "the same folder on all ranks" in said(lambda: session.save(tmp_path / f"state-{rank}"))
            for folder in ("mine", "page"):
                told = said(partial(session.save, tmp_path / folder))
                assert "expected a new folder, or a checkpoint to replace; got other files" in told
            assert "got another program's file. Name a folder" in said(lambda: session.load(tmp_path / "page"))
            model.get_parameter(UNREACHED).data.fill_(float("nan"))  # nobody could go on from it
            told = said(lambda: session.save(tmp_path / "state"))
            assert "master_weights with a value that is not finite" in told

    in_ranks(work, 2, tmp_path)
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_a_rank_that_does_not_see_the_folder_is_named_on_all_ranks(tmp_path):
    def work(rank):
        with opened(ZERO1[0], model=SMALLEST()) as session, pytest.MonkeyPatch.context() as patch:
            session.save(tmp_path / "seen")
            if rank == 1:
                patch.setattr(Path, "is_dir", lambda _: False)  # as where its machine has another disk there
            told = said(lambda: session.save(tmp_path / "state"))
            assert re.search(r"got rank 1: no .*state\.unfinished, which rank 0 has made: give a folder", told)
            told = said(lambda: session.load(tmp_path / "seen"))
            assert re.search(r"rank 1, .*seen: expected a checkpoint; got no such folder\. Give a folder", told)
            patch.undo()
            if rank == 1:  # another folder under the same name
                patch.setattr(state_folder, "read_manifest", lambda folder: replace(read_manifest(folder), step=7))
            told = said(lambda: session.load(tmp_path / "seen"))
            assert re.search(r"manifest\.json in .*seen.* by the same path on all ranks", told)
            patch.undo()
            patch.setattr(state_folder, "Manifest", broken)
            assert "rank 0: OSError: no room" in said(lambda: session.save(tmp_path / "state"))

    def broken(*_, **__):
        raise OSError("no room")

    in_ranks(work, 2, tmp_path)
    assert not list(tmp_path.glob("state*"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("point", "rank"), [("checkpoint-written", 1), ("checkpoint-rename", 0)])
def test_a_writer_that_is_killed_leaves_the_folder_of_before(tmp_path, monkeypatch, point, rank):
    monkeypatch.setenv(VARIABLE, f"{point}:{rank}:2:kill")

    def work(_rank):
        with opened(ZERO1[0], model=SMALLEST()) as session:
            for rows in STEPS[:2]:
                step(session, rows)
                session.save(tmp_path / "state")

    with pytest.raises(LengthwiseError, match=rf"rank {rank}.*died"):
        in_ranks(work, 2, tmp_path)

    monkeypatch.delenv(VARIABLE)
    (tmp_path / "meeting").unlink()
    if rank == 0:  # killed a moment later, between the two renames
        (tmp_path / "state").rename(tmp_path / "state.previous")

    def load(_rank):
        with opened(ZERO1[0], model=SMALLEST()) as session:
            session.load(tmp_path / "state")
            before = session.steps
            session.save(tmp_path / "state")
            return before

    assert in_ranks(load, 1, tmp_path) == [1]
    assert not list(tmp_path.glob("state.*")), "what was left is gone"


def test_a_folder_that_another_job_saves_is_refused_in_words_until_that_job_ends(tmp_path):
    """Also if it is killed; sessions of one job may share a folder."""
    folder, saved, pipe = tmp_path / "jobs/state", tmp_path / "saved", os.pipe()
    job = os.fork()
    if not job:
        try:
            session = opened({}, model=SMALLEST())
            session.save(folder)
            saved.touch()
            os.read(pipe[0], 1)
        finally:
            os._exit(0)
    while not saved.exists():
        time.sleep(0.05)
    with opened({}, model=SMALLEST()) as session, opened({}, model=SMALLEST()) as other:
        for background in (False, True):
            told = said(partial(session.save, folder, background=background))
            assert re.search(rf"expected a folder that no other run is writing; .*{job} on", told)
        os.kill(job, signal.SIGKILL)
        os.waitpid(job, 0)
        session.load(folder)
        session.save(folder)
        other.save(folder)
        session.save(folder.with_name("next"))
    assert {each.name for each in folder.parent.iterdir()} == {"state", "next"}, "no lock"


def test_a_save_in_the_background_is_there_at_a_later_end_and_one_that_fails_is_named(tmp_path, monkeypatch):
    """The folder of before stays; the session goes on, and its next save is whole."""
    folder = tmp_path / "state"
    monkeypatch.setenv(VARIABLE, "checkpoint-write:1:2:error,checkpoint-write:1:3:error")

    def work(_rank):
        seen = []
        with opened(ZERO3[0], model=SMALLEST()) as session:
            rows = STEPS[0]
            step(session, rows)
            session.save(folder, background=True)
            while session.runner.writer.progress != WRITTEN:
                time.sleep(0.01)
            session.sum_over_ranks(torch.zeros(1))  # all have seen that
            assert not folder.exists()
            step(session, rows)
            assert saved_step() == 1
            session.save(folder, background=True)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                session.runner.writer.finish()
            seen.append([str(each.message) for each in caught if each.category is RuntimeWarning])
            step(session, rows)
            seen.append(said(lambda: session.save(folder)))
            assert saved_step() == 1
            step(session, rows)
            session.save(folder, background=True)
        return seen

    def saved_step():
        return json.loads((folder / "manifest.json").read_text())["step"]

    for (warning,), error in in_ranks(work, 2, tmp_path):
        assert "was not written" in warning
        assert "rank 1: OSError: [Errno 5]" in warning
        assert "rank 1: OSError: [Errno 5]" in error
    assert saved_step() == 4, "written until the session closed"
    assert call("checkpoint", "verify", folder) == 0
    assert [each.name for each in tmp_path.glob("state*")] == ["state"]


@pytest.mark.exhaustive
def test_a_save_in_the_background_whose_session_nobody_closes_is_named(tmp_path):
    """A loop that ends without `close` leaves the checkpoint of before, and says so."""

    def work(_rank):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            session = opened(ZERO1[0], model=SMALLEST())
            transport = session._transport
            session.save(tmp_path / "state", background=True)
            session.runner.writer.close()
            del session
            gc.collect()
        transport.close()
        return [str(each.message) for each in caught if "its session was not closed" in str(each.message)]

    ((warning,),) = in_ranks(work, 1, tmp_path)
    assert f"checkpoint {tmp_path / 'state'} of step 0 was not written" in warning
