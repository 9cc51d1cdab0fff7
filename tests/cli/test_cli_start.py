"""Starting a run: what is refused and how it is told, files written whole, torchrun, pipes and narrow terminals."""

import contextlib
import ctypes
import fcntl
import json
import os
import pty
import shlex
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from testing.small import VOCAB, make_rows
from transformers import GPT2Config

from lengthwise.cli.output import refuse_unwritable_file, write_atomically
from lengthwise.cli.train import describe_job
from lengthwise.core.errors import OutputError
from run.small_runs import Command, call, count_lines, job_of, losses, read_lines, told, train, write_run
from tiers import more


def test_a_typing_error_in_the_run_file_is_told_without_torch(tmp_path):
    path = write_run(tmp_path, make_rows([3]), model="tiny", stepz=3)
    code = (
        "import sys\nfrom lengthwise.__main__ import main\n"
        f"sys.argv[1:] = ['train', {str(path)!r}, '--ranks', '0']\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "stepz: unknown key -> `steps`" in done.stderr
    assert "--ranks: expected a whole number from 1 to 262144; got 0" in done.stderr


def test_train_tells_all_problems_of_model_and_data_in_one_message(tmp_path, capfd):
    rows = [{"input_ids": ids} for ids in ([1, 2], [64], [1.5], [], [1] * 90)]
    path = write_run(tmp_path, rows, eval={"data": [{"path": "eval.jsonl"}]})
    (tmp_path / "eval.jsonl").write_text('{"input_ids": [1, 2]\n')
    err = told(capfd, "train", path, "--ranks", 2, status=2)
    for said in ("train.jsonl:2", "train.jsonl:3", "train.jsonl:4", "eval.jsonl:1"):
        assert said in err, said
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "attention_dropout": 0.1}))
    path = write_run(tmp_path, rows[:1] + rows[4:])
    err = told(capfd, "train", path, "--ranks", 2, status=2)
    assert "attention_dropout" in err
    assert "sequence 1 (train.jsonl:2, 90 tokens)" in err
    assert "at least 3 ranks, or set capacity_tokens: 45" in err
    config.write_text("{}")
    write_run(tmp_path, rows)
    err = told(capfd, "train", path, "--ranks", 2, status=2)
    assert f"error[config] {config}: expected a config" in err
    assert "train.jsonl:3" in err
    assert not (tmp_path / "out").exists()


def test_train_refuses_sequences_beyond_a_table_of_positions(tmp_path, capfd):
    """Once an IndexError in the middle of a step."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    GPT2Config(**sizes, **dropouts, max_position_embeddings=16).save_pretrained(tmp_path / "table")
    path = write_run(tmp_path, make_rows([16, 17]), model=tmp_path / "table", capacity_tokens=20, steps=1)
    said = told(capfd, "train", path, status=2)
    for part in ("max_position_embeddings", "sequence 1 (", "17 tokens", "max_tokens: 16"):
        assert part in said


def test_train_refuses_an_output_that_holds_a_run_and_replaces_it_when_asked(tmp_path, capfd):
    path = write_run(tmp_path, make_rows([5, 6, 7]), steps=3)
    output = train(path)
    before = (output / "metrics.jsonl").read_bytes()
    (output / "notes.txt").write_text("mine")
    (output / "more").mkdir()
    (output / "more/metrics.jsonl").write_text("mine too")
    assert "--overwrite" in told(capfd, "train", path, status=2)
    assert (output / "metrics.jsonl").read_bytes() == before
    assert call("train", path, "--overwrite", "--set", "steps=1") == 0
    assert count_lines(output / "metrics.jsonl") == count_lines(output / "ledger.jsonl") == 1
    assert [plan.name for plan in (output / "plans").iterdir()] == ["step-000001.json.gz"]
    assert (output / "notes.txt").read_text() == "mine"
    assert (output / "more/metrics.jsonl").read_text() == "mine too"


def test_train_writes_beside_other_files_and_overwrite_does_not_delete_the_model_it_starts_from(tmp_path, capfd):
    """`output` is the folder of the run file, and `model` a folder in it that --overwrite would replace."""
    path = write_run(tmp_path, make_rows([5, 6, 7]), output=".")
    before = (tmp_path / "model/model.safetensors").read_bytes()
    assert call("train", path, "--set", "optimizer.lr=1.0") == 2, "there is a model in the output folder"
    assert "model" in told(capfd, "train", path, "--overwrite", status=2)
    assert (tmp_path / "model/model.safetensors").read_bytes() == before
    (tmp_path / "model").rename(tmp_path / "weights")
    assert call("train", path, "--set", "model=weights") == 0
    assert (tmp_path / "weights/model.safetensors").read_bytes() == before
    assert (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "train.jsonl").exists()


def clean_environment():
    return {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "COLUMNS")}


def test_train_refuses_ranks_that_conflict_with_torchrun(tmp_path, capfd, monkeypatch):
    keys = {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29_999}
    for key, value in keys.items():
        monkeypatch.setenv(key, str(value))
    path = write_run(tmp_path, make_rows([5]))
    assert "torchrun's 4; got 2" in told(capfd, "train", path, "--ranks", 2, status=2)
    monkeypatch.delenv("MASTER_PORT")
    assert "MASTER_PORT" in told(capfd, "train", path, status=2)


def test_train_whose_reader_went_away_goes_on(tmp_path):
    """`lengthwise train ... | head -1`"""
    path = write_run(tmp_path, make_rows([5, 6]), steps=5)
    reading, writing = os.pipe()
    command = Command("train", path, "--ranks", 1, stdout=writing, prepare=lambda: os.close(reading))
    os.close(writing)
    assert os.read(reading, 20).startswith(b"model")
    os.close(reading)
    status, _, err = command.finish()
    assert status == 0
    assert {line for line in err.splitlines() if line} == {"progress is no longer shown: Broken pipe; the run goes on"}
    assert len(losses(tmp_path / "out")) == 5
    assert (tmp_path / "out/model/model.safetensors").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("log", ["on a full disk", "closed"])
def test_train_whose_log_cannot_be_written_goes_on(tmp_path, log):
    """In a real process, with the interpreter's own last words."""
    run = [sys.executable, "-m", "lengthwise", "train", write_run(tmp_path, make_rows([5, 6])), "--ranks", "2"]
    closed = {"preexec_fn": lambda: os.close(1)} if log == "closed" else {}
    with open("/dev/full", "w") as full:
        done = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, text=True, env=clean_environment(), **closed)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert ("the run goes on" in done.stderr) == (log != "closed")
    assert len(losses(tmp_path / "out")) == 3


def test_command_whose_reader_went_away_ends_without_a_traceback(tmp_path):
    """In a real process, for the interpreter's own last words: the help is longer than one line."""
    command = f"{shlex.quote(sys.executable)} -m lengthwise plan --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=clean_environment())
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(("planner", "status"), [("lengthwise", 0), ("ä", 2)])
def test_command_in_the_c_locale_does_not_crash(tmp_path, planner, status):
    """A real process with LANG=C and ASCII streams: a table, or an error that names a file."""
    (tmp_path / "längen.json").write_text("[5, 70, 9]")
    environment = {**clean_environment(), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    rest = ["--ranks", "2", "--capacity", "64", "--lengths", str(tmp_path / "längen.json")]
    run = [sys.executable, "-m", "lengthwise", "plan", *rest, "--planner", planner]
    done = subprocess.run([*run, "--out", str(tmp_path / "plän.json")], capture_output=True, env=environment)
    assert done.returncode == status, done.stderr.decode(errors="replace")
    assert b"Traceback" not in done.stderr


def started(tmp_path, monkeypatch, place, endless, *arguments, busy=1):
    """Return a command whose `busy` processes are in a call that does not end."""

    def begin(*_, **__):
        (tmp_path / f"here-{os.getpid()}").touch()
        endless()

    monkeypatch.setattr(place, begin)
    command = Command(*arguments[:1], write_run(tmp_path, make_rows([30, 12])), *arguments[1:])
    command.wait_for(lambda: len(list(tmp_path.glob("here-*"))) == busy)
    return command


def assert_interrupted(command, said="interrupted: nothing was saved"):
    status, _, err = command.finish(30)  # half of what the call would take
    assert status == 130
    assert said in err
    assert "Traceback" not in err


def test_train_interrupted_twice_ends_soon_and_leaves_no_process(tmp_path, monkeypatch):
    """While a rank is busy with one long step."""
    place = "lengthwise.session.engine.run_part"
    command = started(tmp_path, monkeypatch, place, lambda: time.sleep(60), "train", "--ranks", 2, busy=2)
    command.send(signal.SIGINT, group=True)
    time.sleep(0.5)
    assert not command.ended(), "the first one waits for the step to end"
    assert command.written()[1] == "\nstopping after this step; press Ctrl-C again to stop now\n"
    command.send(signal.SIGINT, group=True)
    assert_interrupted(command)


@pytest.mark.parametrize(
    ("verb", "place", "sent"),
    [
        more("verify", "lengthwise.session.engine.run_part", signal.SIGINT),
        ("train", "lengthwise.run.checks.load_dataset", signal.SIGTERM),
    ],
)
def test_ranks_that_are_asked_to_stop_before_the_first_step_end_at_once(tmp_path, monkeypatch, verb, place, sent):
    command = started(tmp_path, monkeypatch, place, lambda: time.sleep(60), verb, "--ranks", 2, busy=2)
    command.send(sent, group=sent == signal.SIGINT)
    assert_interrupted(command)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wakes", [True, more(False)])
def test_train_alone_interrupted_twice_ends_soon(tmp_path, monkeypatch, wakes):
    """One process has no parent that could end it: it listens itself, also where Python hears of a signal too late."""

    def endless():
        if not wakes:  # this thread: as in an operation of torch that takes minutes
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        (time if wakes else ctypes.CDLL(None)).sleep(60)

    command = started(tmp_path, monkeypatch, "lengthwise.session.engine.run_part", endless, "train", "--ranks", 1)
    command.send(signal.SIGINT)
    time.sleep(0.3)
    assert not command.ended()
    assert (command.written()[1] != "") == wakes, "said where Python hears of it"
    command.send(signal.SIGINT)
    assert_interrupted(command, f"interrupted{': nothing' if wakes else ' within a step: nothing more'} was saved")


def test_train_says_beforehand_how_long_it_will_take(tmp_path):
    path = write_run(tmp_path, make_rows([30, 12, 5, 40] * 8), capacity_tokens=40, steps=200)
    job = job_of(path)
    assert "time    not estimated: with so little work a step is mostly overhead; each step prints" in describe_job(job)
    assert 0 < job.estimated_step_seconds < 0.1
    larger = job_of(path, overrides=["global_batch.sequences=8"])
    assert larger.estimated_step_seconds == 2 * job.estimated_step_seconds
    assert job_of(path, ranks=4).estimated_step_seconds == job.estimated_step_seconds / 4


@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_train_says_when_nothing_was_trained(tmp_path, capsys, rate):
    path = write_run(tmp_path, make_rows([5, 6]), steps=1, optimizer={"lr": rate})
    assert call("train", path) == 0
    assert ("NOTHING WAS TRAINED" in capsys.readouterr().out) == (rate == 0)


@pytest.mark.parametrize("path", ["/dev/null", "/dev/stdout", "/dev/new", "/proc/self/fd/1"])
def test_devices_and_pipes_are_refused_and_stay(tmp_path, path: str) -> None:
    """To root, a file renamed to /dev/null would be the new /dev/null of the whole machine."""
    with pytest.raises(OutputError, match="a device or a pipe"):
        refuse_unwritable_file(Path(path))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="a device or a pipe"):
        write_atomically(tmp_path / "pipe", "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_links_stay_links_and_what_they_name_is_written(tmp_path) -> None:
    (tmp_path / "there").mkdir()
    link, named = tmp_path / "link.json", tmp_path / "there" / "file.json"
    link.symlink_to(named)
    for text in ("new", "newer"):
        write_atomically(link, text)
        assert link.is_symlink()
        assert named.read_text() == text
    assert [each.name for each in (tmp_path / "there").iterdir()] == ["file.json"]


def test_a_write_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch) -> None:
    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file.json", "text")
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_train_shows_every_step_whole_on_a_terminal(tmp_path):
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    path = write_run(tmp_path, make_rows([30, 12, 5, 40]), capacity_tokens=40, steps=4)
    run = Command("train", path, "--ranks", 2, stdout=terminal, prepare=lambda: os.environ.pop("COLUMNS", None))
    os.close(terminal)
    shown = ""
    with contextlib.suppress(OSError):  # the last one that writes to the terminal has ended
        while found := os.read(screen, 4096):
            shown += found.decode()
    os.close(screen)
    assert run.finish()[0] == 0
    lines = shown.replace("\r\n", "\n").replace("\r\x1b[K", "").split("\n")
    assert "\r" not in "".join(lines), "a line went over another"
    for row in read_lines(tmp_path / "out/metrics.jsonl"):
        (first,) = [n for n, line in enumerate(lines) if line.startswith(f"step {row['step']}/4")]
        said = lines[first : first + 2]
        assert f"{row['loss']:.4f}" in " ".join(said)
        assert max(map(len, said)) <= 60


@pytest.mark.exhaustive
def test_a_full_disk_under_the_output_is_told_without_a_traceback(tmp_path) -> None:
    command = [sys.executable, "-m", "lengthwise", "simulate", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error[output] standard output or a file: expected room on the disk; got a full disk\n"
