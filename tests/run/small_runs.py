"""Small runs for tests, what they wrote, and the command in processes."""

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
import traceback
import weakref
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from testing.small import write_model
from transformers.utils.logging import disable_progress_bar

import lengthwise
from lengthwise.cli import main
from lengthwise.core.files import read_plan_text
from lengthwise.core.plan import Plan
from lengthwise.run.callbacks import Callback
from lengthwise.run.checks import prepare_job
from lengthwise.run.prepared_run import read_start

torch.set_num_threads(1)
disable_progress_bar()

METRIC_KEYS = {
    "step", "loss", "grad_norm", "lr", "num_sequences", "num_tokens", "num_loss_tokens", "num_microbatches",
    "step_seconds", "tokens_per_second", "imbalance_ratio", "idle_ratio", "ring_token_ratio", "plan_seconds",
    "predicted_step_seconds", "peak_memory_bytes", "offloaded_bytes", "offload_wait_seconds", "exposed_ring_seconds",
}  # fmt: skip


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_run(folder, rows=None, *, name="run.yaml", model=None, **keys):
    """Write model, rows and a run file (JSON is YAML); `keys` change it."""
    folder.mkdir(parents=True, exist_ok=True)
    if model is None and "model" not in keys:
        model = folder / "model"
        if not model.exists():
            write_model(model)
    if rows is not None:
        write_rows(folder / "train.jsonl", rows)
    values = {
        "model": str(model), "data": [{"path": "train.jsonl"}], "steps": 3, "global_batch": {"sequences": 4},
        "capacity_tokens": 32, "precision": "fp64", "output": "out", **keys,
    }  # fmt: skip
    if not isinstance(values.get("optimizer"), str):  # fixed, as defaults depend on the model
        given = values.get("optimizer") or {}
        rate = {} if "name" in given else {"lr": 3e-4}
        values["optimizer"] = {"schedule": "constant", "warmup_steps": 0, **rate, **given}
    values = {key: value for key, value in values.items() if value is not None}
    path = folder / name
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def call(*arguments):
    """Run the command in this process; return its exit status."""
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in arguments])
    return ended.value.code


def told(capture, *arguments, status=0):
    """Run the command, which ends with this status; return what it prints, and then its errors."""
    assert call(*arguments) == status
    out, err = capture.readouterr()
    assert "Traceback" not in err
    return out + err


def job_of(path, overrides=(), ranks=1):
    """Return the job that a rank makes."""
    return prepare_job(read_start(path, overrides, ranks=ranks, timeout_seconds=60))


def train(path, *arguments):
    status = call("train", path, *arguments)
    assert status == 0
    return path.parent / "out"


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def resume_after(step, *, lines=MappingProxyType({}), accepts_changes=False):
    """Return what a run's folder asks of a checkpoint."""
    return SimpleNamespace(step=step, manifest=SimpleNamespace(lines=lines), accepts_changes=accepts_changes)


def plans_of(output):
    return [Plan.from_json(read_plan_text(path)) for path in sorted((output / "plans").iterdir())]


def losses(output):
    return [row["loss"] for row in read_lines(output / "metrics.jsonl")]


def steps_of(output):
    """The sequences of each step, by the ledger."""
    return [row["sequences"] for row in read_lines(output / "ledger.jsonl")]


class Fault(Exception):
    pass


class FailsAfter(Callback):
    def __init__(self, step):
        self._step = step

    def on_step(self, step):
        if step.metrics.step == self._step:
            raise Fault


WHOLE = {}  # by what decides it: the output of a run


def whole(path, ranks=1):
    """Return the output of the run that nothing disturbs: one in a session of tests for all with its settings."""
    settings = json.loads(path.read_text())
    files = [*path.parent.glob("*.jsonl"), *Path(settings["model"]).glob("*")]
    contents = sorted((file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files)
    key = json.dumps([ranks, {**settings, "model": None}, contents])
    if key not in WHOLE:
        output = path.parent.parent / f"whole-{len(WHOLE)}"  # beside the folder of the test, which may go
        lengthwise.train(path, ranks=ranks, overrides=[f"output={output}"])
        WHOLE[key] = output
    return WHOLE[key]


def broken_off(path, ranks, after, callbacks=()):
    with pytest.raises(lengthwise.LengthwiseError, match="Fault"):
        lengthwise.train(path, ranks=ranks, callbacks=[*callbacks, FailsAfter(after)])
    return path.parent / "out"


def model_of(output):
    folder = output / "model"
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def assert_equal_runs(found, wanted, *, exactly=True, rows_of=steps_of):
    assert rows_of(found) == rows_of(wanted)
    assert [row["step"] for row in read_lines(found / "metrics.jsonl")] == list(range(1, len(losses(wanted)) + 1))
    assert len(list((found / "plans").iterdir())) == len(losses(wanted))
    ours, theirs = model_of(found), model_of(wanted)
    assert losses(found) == (losses(wanted) if exactly else pytest.approx(losses(wanted), rel=1e-11))
    torch.testing.assert_close(ours, theirs, **({"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-9, "atol": 1e-11}))


class Command:
    """The command in a process, session and process group of its own, forked from this one to spare it the imports."""

    living: ClassVar = weakref.WeakSet()  # a test that fails leaves some: conftest.py ends them

    def __init__(self, *arguments, prepare=lambda: None, stdout=None, **environment):
        self.living.add(self)
        self._files = [os.memfd_create("out"), os.memfd_create("err")]
        self._status = None
        self.group = self.pid = os.fork()
        if not self.pid:
            self._become(list(map(str, arguments)), prepare, stdout, environment)

    def _become(self, arguments, prepare, stdout, environment):
        status = 99
        try:
            torch.set_num_threads(1)  # before it has threads: the first two would mend the forked thread pool at once
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(self._files[0] if stdout is None else stdout, 1)
            os.dup2(self._files[1], 2)
            encoding = environment.pop("PYTHONIOENCODING", "utf-8")
            sys.stdout = sys.__stdout__ = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
            sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
                2, "w", buffering=1, encoding=encoding, errors="backslashreplace", closefd=False
            )
            os.environ.update(environment)
            prepare()
            main(arguments)
        except SystemExit as ended:
            status = ended.code
        except BaseException:  # noqa: BLE001 - told as the interpreter would
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(status)

    def ranks(self):
        """Pids of its children, by rank (the order they were forked in)."""
        return children(self.pid)

    def send(self, number, *, group=False):
        (os.killpg if group else os.kill)(self.pid, number)

    def ended(self):
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status is not None

    def wait_for(self, condition, seconds=120):
        deadline = time.monotonic() + seconds
        while not condition():
            if self.ended() or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"it never came: {self.written()}")
            time.sleep(0.01)

    def written(self):
        return [os.pread(file, 1 << 24, 0).decode(errors="backslashreplace") for file in self._files]

    def __del__(self):
        for file in self._files:
            os.close(file)

    def finish(self, seconds=120):
        """Wait for its end; return (exit status, output, errors). Nothing of it may be left.

        The planner of a rank that was killed ends as soon as it has read the end of its input: on a busy machine later.
        """
        deadline = time.monotonic() + seconds
        while not self.ended():
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"did not end in {seconds} s: {self.written()}")
            time.sleep(0.01)
        deadline = time.monotonic() + 20
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()
        self.living.discard(self)
        assert not left, f"processes left behind: {left}"
        return self._status, *self.written()

    def left(self):
        """Pids of its process group that are still there."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                state, group, threads = fields[0], int(fields[2]), int(fields[17])
                if group == self.group and (state != "Z" or threads > 1):  # those hold its files a moment longer
                    found.append(int(stat.parent.name))
        return found

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)


def children(pid):
    """Pids of the children that the main thread of a process started, in the order of their starts.

    The kernel lists them so; pids themselves start again from below after the largest one.
    """
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def count_lines(path):
    return path.read_text().count("\n") if path.exists() else 0
