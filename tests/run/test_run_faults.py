"""Faults at named points, of every rank: what is left is whole, and the run goes on to the same bits."""

import signal
from pathlib import Path

import pytest
from testing.faults import POINTS, VARIABLE

import lengthwise
from lengthwise.checkpoint import CheckpointFolder
from lengthwise.core.faults import fault
from lengthwise.run import api, launch
from run.small_runs import Command, assert_equal_runs, call, count_lines, whole
from run.test_run_resume import run_of
from tiers import more

OF_RANK_0 = frozenset(("checkpoint-manifest", "checkpoint-rename", "checkpoint-committed", "model-save"))
OF_SAVING = [
    ("checkpoint-write", 0),
    ("checkpoint-write", 1),
    ("checkpoint-written", 1),
    ("checkpoint-manifest", 0),
    ("checkpoint-rename", 0),
]
LAST = 7  # step of the runs
BY_DEFAULT = {("checkpoint-rename", 0)}
KILLED = [
    case if case in BY_DEFAULT else more(*case)
    for case in ((point, rank) for point in POINTS for rank in (0, 1) if not (rank and point in OF_RANK_0))
]
SOURCES = Path(lengthwise.__file__).parent


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path = run_of(tmp_path_factory.mktemp("whole"))
    return whole(path, ranks=2)


def fault_of(point, rank, action):
    step = {"start": 0, "model-save": LAST}.get(point, 4)
    return f"{point}:{rank}:{step}:{action}"


@pytest.mark.parametrize(("point", "rank"), KILLED)
def test_a_rank_killed_anywhere_costs_no_more_than_the_steps_since_the_checkpoint(
    tmp_path, monkeypatch, undisturbed, point, rank
):
    path = run_of(tmp_path)
    monkeypatch.setenv(VARIABLE, fault_of(point, rank, "kill"))
    with pytest.raises(lengthwise.LengthwiseError, match=rf"rank {rank}.*died \(signal SIGKILL\)"):
        lengthwise.train(path, ranks=2)
    monkeypatch.delenv(VARIABLE)
    resumes = point != "start"
    if resumes:
        _, manifest, passed_over = CheckpointFolder(tmp_path / "out/checkpoints").newest()
        done = {"model-save": LAST, "checkpoint-committed": 4}.get(point, 2)
        assert (manifest.step, passed_over) == (done, [])
    lengthwise.train(path, ranks=2, resume=resumes)
    assert_equal_runs(tmp_path / "out", undisturbed)
    assert not list((tmp_path / "out").rglob("*.unfinished"))


@pytest.mark.parametrize(("point", "rank", "action", "said"), [
    ("update", 1, "kill", "restart 1 of 2, from step 2: error[rank] rank 1"),
    more("microbatches", 0, "stop", "restart 1 of 2, from step 2: "),
    more("start", 1, "kill", "restart 1 of 2, from its start: error[rank] rank 1"),
])  # fmt: skip
def test_ranks_are_started_again_and_the_run_goes_on(
    tmp_path, monkeypatch, capfd, undisturbed, point, rank, action, said
):
    path = run_of(tmp_path)
    monkeypatch.setenv(VARIABLE, fault_of(point, rank, action))
    assert call("train", path, "--ranks", 2, "--max-restarts", 2, "--timeout-seconds", 4) == 0
    out = capfd.readouterr().out
    assert said in out
    assert out.count("restart ") == 1
    assert_equal_runs(tmp_path / "out", undisturbed)
    assert not list((tmp_path / "out").rglob("*.unfinished"))


def test_ranks_that_always_die_are_given_up(tmp_path, monkeypatch, capfd):
    def dies(_start, world, *_, **__):
        if world.rank:
            raise RuntimeError("as ever")

    monkeypatch.setattr(api, "train_rank", dies)
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.2)  # rank 0 ended well, and waits for the others
    assert call("train", run_of(tmp_path), "--ranks", 2, "--max-restarts", 3) == 1
    said = capfd.readouterr()
    assert said.err.count("\nRuntimeError: as ever\n") == 4


@pytest.mark.exhaustive
@pytest.mark.parametrize(("point", "rank"), OF_SAVING)
def test_a_disk_that_fails_costs_one_checkpoint_and_no_step(tmp_path, monkeypatch, capfd, undisturbed, point, rank):
    path = run_of(tmp_path)
    monkeypatch.setenv(VARIABLE, fault_of(point, rank, "error"))
    assert call("train", path, "--ranks", 2) == 0
    assert "the checkpoint after step 4 was not written: " in capfd.readouterr().out
    assert_equal_runs(tmp_path / "out", undisturbed)
    assert CheckpointFolder(tmp_path / "out/checkpoints").steps() == [2, 6, 7]
    assert not list((tmp_path / "out").rglob("*.unfinished"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("point", "phase"),
    [("microbatches", "step 4, start"), ("update", "step 4, step end"), ("checkpoint-copy", "step 4, checkpoint")],
)
def test_a_rank_that_hangs_is_named_with_its_phase_in_time(tmp_path, monkeypatch, point, phase):
    path = run_of(tmp_path)
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 1.0)
    monkeypatch.setenv(VARIABLE, fault_of(point, 1, "stop"))
    with pytest.raises(lengthwise.LengthwiseError) as caught:
        lengthwise.train(path, ranks=2, timeout_seconds=2)
    assert f"no report from rank 1, last seen in {phase}." in str(caught.value)


@pytest.mark.parametrize("rank", [more(0), 1])
def test_a_rank_that_is_asked_to_end_commits_and_the_run_goes_on_from_there(tmp_path, monkeypatch, undisturbed, rank):
    path = run_of(tmp_path)
    monkeypatch.setenv(VARIABLE, fault_of("microbatches", rank, "term").replace(":4:", ":3:"))
    result = lengthwise.train(path, ranks=2)
    assert (result.steps, result.stopped_by) == (3, signal.SIGTERM)
    monkeypatch.delenv(VARIABLE)
    lengthwise.train(path, ranks=2, resume=True)
    assert_equal_runs(tmp_path / "out", undisturbed)


def test_every_point_and_action_is_there_and_faults_are_of_torchruns_first_start_alone(monkeypatch):
    sources = "".join(path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py"))
    assert [point for point in POINTS if f'fault("{point}"' not in sources] == []
    monkeypatch.setenv(VARIABLE, "update:0:1:error")
    with pytest.raises(OSError, match="Input/output error"):
        fault("update", 0, 1)
    fault("update", 0, 2)
    fault("update", 1, 1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    fault("update", 0, 1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv(VARIABLE, "nowhere:0:1:kill")
    with pytest.raises(ValueError, match="points are start"):
        fault("update", 0, 1)


@pytest.mark.exhaustive
def test_a_slow_save_holds_nobody_up_in_the_background(tmp_path, monkeypatch, undisturbed):
    path = run_of(tmp_path, checkpoint={"every_steps": 2})
    monkeypatch.setenv(VARIABLE, fault_of("checkpoint-write", 1, "sleep").replace(":4:", ":2:"))
    command = Command("train", path, "--ranks", 2)
    command.wait_for(lambda: count_lines(tmp_path / "out/metrics.jsonl") >= 3)
    assert CheckpointFolder(tmp_path / "out/checkpoints").steps() == []  # step 3 is done, the save of step 2 is not
    assert command.finish()[0] == 0
    assert_equal_runs(tmp_path / "out", undisturbed)
