"""The folder of a run: what is refused, one run at a time, and a model that is whole or not there."""

import contextlib
import errno
import gzip
import json
import os
import re
import resource
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from testing.small import make_rows, write_model
from transformers import GenerationConfig

from data.stores import save_words
from lengthwise import train
from lengthwise.config import build_config, load_config
from lengthwise.core.errors import OutputError, WriteError
from lengthwise.core.files import read_plan_text
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.run import export, setup
from lengthwise.run.callbacks import EvalMetrics, FinishedStep, StepMetrics
from lengthwise.run.folder import CONFIG, RunFolder
from run.small_runs import Command, call, count_lines, read_lines, resume_after, write_run
from tiers import more

PLAIN = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
ZERO3 = ("--set", "shard=zero3", "--ranks", 2)
ENDLESS = {"steps": 1_000_000, "measurements": "off"}  # long runs measure the machine first


def test_run_folder_refuses_a_file_a_run_and_an_input_and_names_them(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="a file"):
        RunFolder(tmp_path / "file").check_free(overwrite=True)
    for name in ("metrics.jsonl", "config.yaml"):
        (tmp_path / name).write_text("")
    with pytest.raises(OutputError, match=r"config\.yaml, metrics\.jsonl"):
        RunFolder(tmp_path).check_free(overwrite=False)
    RunFolder(tmp_path / "fresh").check_free(overwrite=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "model")
    for name in ("model", "model/tokenizer", "link"):
        with pytest.raises(OutputError, match="input"):
            RunFolder(tmp_path).check_free(overwrite=True, inputs=[tmp_path / name])
    RunFolder(tmp_path).check_free(overwrite=True, inputs=[tmp_path / "model2", tmp_path])


@pytest.mark.exhaustive
def test_a_living_run_keeps_its_folders_and_those_of_a_killed_one_are_free(tmp_path, monkeypatch, capfd):
    """The output, whatever is asked; there are no temporary ones."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    path = write_run(tmp_path, make_rows([30, 12]), **ENDLESS)
    killed, living = (Command("train", path, "--ranks", 2, "--set", f"output={name}") for name in ("a", "b"))
    for command, name in ((killed, "a"), (living, "b")):
        command.wait_for(lambda name=name: count_lines(tmp_path / name / "metrics.jsonl") >= 2)
    lines = count_lines(tmp_path / "b/metrics.jsonl")
    for arguments in ((), ("--overwrite",)):
        assert call("train", path, *arguments, "--set", "output=b") == 2
        err = capfd.readouterr().err
        assert err.startswith(
            f"error[output] {tmp_path / 'b'}: expected a folder that no other run is writing; got one"
        )
        assert f"process {living.ranks()[0]} on {os.uname().nodename}" in err
        assert (err.count("\n"), "Traceback" in err) == (1, False)
    assert count_lines(tmp_path / "b/metrics.jsonl") >= lines, "nothing of the living run is deleted"
    killed.kill()
    assert killed.finish()[0] == -signal.SIGKILL
    assert call("train", path, "--overwrite", "--set", "output=a", "steps=1") == 0
    living.send(signal.SIGTERM)
    assert living.finish()[0] == 0
    assert not (tmp_path / "b/run.lock").exists()
    assert os.listdir(tmp_path / "tmp") == []


def test_the_ranks_of_a_killed_launcher_are_waited_for(tmp_path):
    """They hold its lock until they end."""
    launcher = os.fork()
    if not launcher:
        with RunFolder(tmp_path / "out").claimed(overwrite=False):
            if os.fork():
                os._exit(0)
            time.sleep(0.5)
            os._exit(0)
    os.waitpid(launcher, 0)
    with RunFolder(tmp_path / "out").claimed(overwrite=False):
        pass


def test_of_many_that_claim_a_folder_at_once_one_gets_it(tmp_path):
    """Again and again: claims end, and remove their lock and empty folders, while others are being made."""
    together, got = threading.Barrier(4, timeout=20), []  # where two get it, others wait in vain
    (tmp_path / "out").mkdir()

    def claim(_):
        for round in range(50):
            together.wait()
            with contextlib.suppress(OutputError), RunFolder(tmp_path / "out").claimed(overwrite=False):
                got.append(round)
                assert os.listdir(tmp_path / "out") == ["run.lock"]
                if round % 2:
                    together.wait()
                    continue
            if round % 2:
                together.wait()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(claim, range(4))) == [None] * 4
    assert sorted(set(got)) == list(range(50))
    assert all(got.count(round) == 1 for round in range(1, 50, 2)), "while one holds it, no other does"
    assert not os.listdir(tmp_path / "out")
    with RunFolder(tmp_path / "a/b/out").claimed(overwrite=False):
        pass
    assert os.listdir(tmp_path) == ["out"]


def test_a_run_killed_while_it_saves_leaves_no_model(tmp_path, monkeypatch):
    save = export.save_model

    def killed_halfway(model, folder):
        save(model, folder)
        (folder / "model.safetensors").unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    path = write_run(tmp_path, make_rows([30, 12]))
    monkeypatch.setattr(export, "save_model", killed_halfway)
    assert Command("train", path).finish()[0] == -signal.SIGKILL
    assert not (tmp_path / "out/model").exists()
    assert (tmp_path / "out/model.unfinished").exists()
    monkeypatch.undo()
    assert call("train", path, "--overwrite") == 0
    assert (tmp_path / "out/model/model.safetensors").exists()
    assert not (tmp_path / "out/model.unfinished").exists()


def test_an_interrupt_says_whether_the_model_was_saved_and_names_the_newest_checkpoint(tmp_path, monkeypatch, capfd):
    """Interrupted before the model is there and after: what is said is what is true."""

    def interrupted(*_):
        raise KeyboardInterrupt

    path = write_run(tmp_path, make_rows([30, 12]), steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(setup, "write_model", interrupted)
        keys = ("--set", "checkpoint={every_steps: 1, background: false}")
        assert call("train", path, *keys, "--ranks", 1) == 130
    saved = f"interrupted: the newest checkpoint is {tmp_path}/out/checkpoints/step-000001; resume from"
    err = capfd.readouterr().err
    assert err.startswith(saved)
    assert err.endswith(
        f"lengthwise train {path} --set 'checkpoint={{every_steps: 1, background: false}}' --ranks 1 --resume\n"
    )
    monkeypatch.setattr(setup.RankRun, "close", interrupted)
    assert call("train", path, "--overwrite") == 130
    assert f"interrupted: the model is saved in {tmp_path / 'out/model'}; no checkpoint" in capfd.readouterr().err
    assert (tmp_path / "out/model/model.safetensors").exists()


def test_a_saved_model_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A machine that loses power finds the whole model under `model`, or none."""
    config = load_config(write_run(tmp_path, make_rows([5, 6])))
    done = []
    sync, rename = os.fsync, Path.rename

    def synced(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def renamed(self, target):
        done.append(f"rename to {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    with RunFolder(config.output).claimed(overwrite=False), RunFolder(config.output).saving() as unfinished:
        (unfinished / "a").write_text("x")
        (unfinished / "b").write_text("y")
    assert sorted(done[:2]) == ["a", "b"]
    assert done[2:] == ["model.unfinished", "rename to model", config.output.name]


@pytest.mark.parametrize(("ranks", "under_nohup"), [(2, False), more(1, True)])
def test_a_run_whose_terminal_is_gone_saves_its_model(tmp_path, ranks, under_nohup):
    """At once; under nohup when all its steps are done."""
    path = write_run(tmp_path, make_rows([30, 12]), **{**ENDLESS, **({"steps": 20} if under_nohup else {})})
    kind = signal.SIG_IGN if under_nohup else signal.SIG_DFL
    command = Command("train", path, "--ranks", ranks, prepare=lambda: signal.signal(signal.SIGHUP, kind))
    command.wait_for(lambda: count_lines(tmp_path / "out/metrics.jsonl") >= 2)
    command.send(signal.SIGHUP, group=not under_nohup)  # to the planner's process, too
    status, out, _ = command.finish()
    assert status == 0
    assert ("stopped by SIGHUP after step" in out) != under_nohup
    assert not under_nohup or count_lines(tmp_path / "out/metrics.jsonl") == 20
    assert (tmp_path / "out/model/model.safetensors").exists()


def test_going_on_with_a_full_disk_leaves_the_config_as_it_was(tmp_path):
    values = {"model": "tiny", "data": [{"python_stdlib": True}], "global_batch": {"sequences": 1}, "steps": 2}
    config = build_config({**values, "output": "out"}, folder=tmp_path)
    folder = RunFolder(tmp_path / "out", lambda _line: None, most_log_bytes=1e9)
    folder.start(config)
    before = (tmp_path / "out" / CONFIG).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        with pytest.raises(WriteError):
            folder.go_on(config, resume_after(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "out" / CONFIG).read_bytes() == before
    assert not list((tmp_path / "out").glob("*.unfinished"))


def test_what_cannot_be_written_ends_the_run_with_file_and_reason(tmp_path, monkeypatch, capfd):
    (tmp_path / "eval.jsonl").mkdir()
    with pytest.raises(WriteError, match=r"eval\.jsonl: expected .* got .*Is a directory"):
        RunFolder(tmp_path).on_eval(EvalMetrics(step=1, loss=1.0, num_sequences=1, num_tokens=3, num_loss_tokens=2))

    def failing(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = write_run(tmp_path, make_rows([30, 12]), steps=1)
    monkeypatch.setattr(setup, "write_model", failing)
    assert call("train", path) == 1
    assert "No space left on device" in capfd.readouterr().err
    assert not (tmp_path / "out/model").exists()


def test_the_earlier_model_stays_until_the_resumed_run_has_its_own(tmp_path, monkeypatch, capfd):
    """All files have the mode of any new one, though safetensors writes its own for their owner alone."""
    path = write_run(tmp_path, make_rows([30, 12]), steps=2, checkpoint={"every_steps": 2})
    mask = os.umask(0o027)
    try:
        assert call("train", path) == 0
    finally:
        os.umask(mask)
    assert {each.stat().st_mode & 0o777 for each in (tmp_path / "out").rglob("*") if each.is_file()} == {0o640}
    weights = tmp_path / "out/model/model.safetensors"
    before = weights.read_bytes()

    def interrupted(*_):
        raise KeyboardInterrupt

    longer = ("train", path, "--resume", "--set", "steps=4", "--accept-changes")
    with monkeypatch.context() as patch:
        patch.setattr(setup, "write_model", interrupted)
        assert call(*longer) == 130
    assert weights.read_bytes() == before
    capfd.readouterr()
    assert call(*longer) == 0
    assert "already finished" not in capfd.readouterr().out, "its last checkpoint is there, its model is not"
    assert weights.read_bytes() != before
    assert call(*longer) == 0
    assert capfd.readouterr().out == (
        f"already finished: 4 steps, model in {tmp_path / 'out/model'}; "
        "to train on, raise steps or epochs and add --accept-changes\n"
    )


def finished(step, sequences):
    """A step of 40 sequences over two ranks."""
    plan = Plan(
        ranks=2,
        layers=1,
        capacity=100,
        tokens=(1,) * 40,
        microbatches=(Microbatch(pieces=(Piece(ranks=(step % 2,), sequences=tuple(range(40))),)),),
    )
    metrics = StepMetrics(
        plan=plan, busy_seconds=[1.0, 0.0], step=step, loss=1.0, grad_norm=1.0, lr=1.0, num_loss_tokens=40,
        step_seconds=1.0, plan_seconds=1.0, predicted_step_seconds=1.0, peak_memory_bytes=1, offloaded_bytes=0,
        offload_wait_seconds=0.0, exposed_ring_seconds=0.0,
    )  # fmt: skip
    return FinishedStep(metrics=metrics, num_steps=500, sequences=sequences, plan=plan)


def test_plans_and_ledger_stay_small_and_the_newest_are_there(tmp_path):
    """A run goes on within the same limits, and takes lines back that were moved to the older half."""
    config = load_config(write_run(tmp_path, make_rows([3])))
    most = 40_000  # 9 plans of a block each, some 100 lines of the ledger in either half

    def check(last):
        plans = sorted(path.name for path in (tmp_path / "out/plans").iterdir())
        assert plans == [f"step-{step:06d}.json.gz" for step in range(last - 8, last + 1)]
        files = [tmp_path / "out" / name for name in ("ledger.old.jsonl", "ledger.jsonl")]
        assert sum(path.stat().st_size for path in files if path.exists()) <= most
        rows = [json.loads(line) for path in files if path.exists() for line in path.read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(rows[0]["step"], last + 1))
        assert count_lines(tmp_path / "out/metrics.jsonl") == last
        return rows[0]["step"]

    run = RunFolder(tmp_path / "out", most_log_bytes=most)
    run.start(config)
    for step in range(1, 301):
        run.on_step(finished(step, tuple(range(step, step + 40))))
    first = check(300)
    assert first > 50
    again = RunFolder(tmp_path / "out", most_log_bytes=most)
    again.go_on(config, resume_after(295))
    for step in range(296, 401):
        again.on_step(finished(step, tuple(range(step, step + 40))))
    check(400)
    text = read_plan_text(tmp_path / "out/plans/step-000400.json.gz")
    assert Plan.from_json(text) == finished(400, ()).plan


@pytest.mark.parametrize("change", [lambda packed: packed[:-4], lambda packed: packed[:-9] + b"broken!!!"])
def test_a_plan_that_is_no_whole_gzip_is_refused(tmp_path, change):
    path = tmp_path / "plan.json.gz"
    path.write_bytes(change(gzip.compress(b"{}")))
    with pytest.raises(OSError, match="broken gzip"):
        read_plan_text(path)


DAMAGES = {
    "garbage": ("metrics.jsonl", b"{{{"),
    "no UTF-8": ("ledger.jsonl", b'{"step": 1, "a": "\xff"}'),
    "no step": ("not_finite.jsonl", b'{"what": "loss"}'),
    "no whole step": ("ledger.jsonl", b'{"step": 1e400}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_line_is_named_before_anything_changes(tmp_path, damage):
    config = load_config(write_run(tmp_path, make_rows([3])))
    run = RunFolder(tmp_path / "out")
    run.start(config)
    for step in (1, 2, 3):
        run.on_step(finished(step, (1,)))
    (run.model).mkdir()
    name, line = DAMAGES[damage]
    path = run.path / name
    path.write_bytes(line + b"\n" + (path.read_bytes() if path.exists() else b""))
    before = {each: each.is_file() and each.read_bytes() for each in run.path.rglob("*")}
    with pytest.raises(OutputError) as found:
        run.go_on(config, resume_after(1))
    assert found.value.where == f"{path}:1"
    assert {each: each.is_file() and each.read_bytes() for each in run.path.rglob("*")} == before


def cut(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))


def cut_in_the_middle(path):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], *lines[2:]]))


LOST = {
    "metrics cut": ("metrics.jsonl", cut, "got 2 lines of 4"),
    "metrics away": ("metrics.jsonl", Path.unlink, "got 0 lines of 4"),
    "ledger cut": ("ledger.jsonl", cut, "got no line of step 3, 4"),
    "ledger middle": ("ledger.jsonl", cut_in_the_middle, "got no line of step 2."),
    "ledger away": ("ledger.jsonl", Path.unlink, "got no line of step 1, 2, 3, 4"),
    "evaluation away": ("eval.jsonl", Path.unlink, "got 0 lines of 2"),
}


@pytest.mark.parametrize("loss", list(LOST))
def test_lines_that_are_lost_are_named_before_anything_changes(tmp_path, loss):
    """The run goes on without them where it accepts changes, and says so; its next checkpoint counts what there is."""
    config, notes = load_config(write_run(tmp_path, make_rows([3]))), []
    run = RunFolder(tmp_path / "out")
    run.start(config)
    for step in (1, 2, 3, 4):
        run.on_step(finished(step, (1,)))
        if step % 2 == 0:
            run.on_eval(EvalMetrics(step=step, loss=1.0, num_sequences=1, num_tokens=3, num_loss_tokens=2))
    lines = run.synced_lines()
    run.on_step(finished(5, (1,)))
    name, lose, got = LOST[loss]
    lose(run.path / name)
    before = {each: each.is_file() and each.read_bytes() for each in run.path.rglob("*")}
    again = RunFolder(tmp_path / "out", notes.append)
    with pytest.raises(OutputError, match=re.escape(got)) as found:
        again.go_on(config, resume_after(4, lines=lines))
    assert found.value.where == str(run.path / name)
    assert {each: each.is_file() and each.read_bytes() for each in run.path.rglob("*")} == before
    again.go_on(config, resume_after(4, lines=lines, accepts_changes=True))
    assert name in notes[0]
    kept = {name: len(read_lines(run.path / name)) for name in lines if (run.path / name).exists()}
    assert again.synced_lines() == {**dict.fromkeys(lines, 0), **kept}


def test_what_no_run_can_go_on_with_is_refused_at_the_start(broken):
    """A name of no plan, a pipe, an evaluation after infinitely many steps, a link where the model goes."""
    out = broken.parent / "out"
    plans = sorted((out / "plans").iterdir())
    for name in ("plans/step-abc.json.gz", "metrics.jsonl", "model-best/evaluation.json", "model"):
        there, earlier = out / name, (out / name).read_bytes() if (out / name).exists() else None
        there.parent.mkdir(exist_ok=True)
        there.unlink(missing_ok=True)
        if name == "metrics.jsonl":
            os.mkfifo(there)
        elif name == "model":
            there.symlink_to(broken.parent)
        else:
            there.write_text('{"step": 1e400, "loss": 1.0, "data": "a"}')
        with pytest.raises(OutputError) as found:
            train(broken, ranks=2, resume=True)
        assert found.value.where == str(there)
        there.unlink()
        assert earlier is None or there.write_bytes(earlier)
        assert sorted((out / "plans").iterdir()) == plans


@pytest.mark.parametrize(("layout", "template", "ends"), [(ZERO3, PLAIN, [1, 2]), more((), None, [1])])
def test_the_saved_model_stops_where_turns_and_texts_end(tmp_path, layout, template, ends):
    """At the end and out of a checkpoint; what the model's own generation config has besides stays."""
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "additional_special_tokens": ["<end>"]}
    words = ["<unk>", "<eos>", "<end>", "<pad>", "a", "b"]
    tokenizer = save_words(tmp_path / "tokenizer", words, template=template, **special)
    model = write_model(tmp_path / "model", eos_token_id=9, bos_token_id=8)
    GenerationConfig(eos_token_id=9, bos_token_id=8, max_length=77).save_pretrained(model)
    chat = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b a"}]
    row = {"text": "a b"} if template is None else {"messages": chat}
    path = write_run(tmp_path, [row] * 4, tokenizer=tokenizer, steps=1, checkpoint={"every_steps": 1})
    assert call("train", path, *layout) == 0
    assert call("checkpoint", "export", tmp_path / "out", tmp_path / "exported") == 0
    for saved in (tmp_path / "out/model", tmp_path / "exported"):
        config, generation = (json.loads((saved / f"{name}config.json").read_text()) for name in ("", "generation_"))
        assert config["eos_token_id"] == (ends if len(ends) > 1 else ends[0])
        assert (generation["eos_token_id"], generation["max_length"]) == ([*ends, 9], 77)
        assert [(each["pad_token_id"], each["bos_token_id"]) for each in (config, generation)] == [(3, 8)] * 2
