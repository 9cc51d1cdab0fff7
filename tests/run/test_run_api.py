"""`train` and `verify` as functions: what they take, what they return, who hears of a run."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
from testing.small import make_rows

from lengthwise.config import load_config
from lengthwise.core.errors import CallbackError, LengthwiseError
from lengthwise.core.plan import Plan
from lengthwise.run.api import train, verify
from lengthwise.run.callbacks import Callback
from lengthwise.run.prepared_run import read_start
from run.small_runs import read_lines, write_run


class Heard(Callback):
    def __init__(self, file):
        self._file = file

    def _write(self, *words):
        with self._file.open("a") as file:
            print(os.getpid() == int(self._file.stem), *words, file=file)

    def on_start(self, job):
        self._write("start", job.ranks)

    def on_step(self, step):
        self._write("step", step.metrics.step, len(step.sequences))

    def on_eval(self, metrics):
        self._write("eval", metrics.step)

    def on_end(self, result):
        self._write("end", result.steps)


def test_train_takes_a_file_its_values_or_its_settings_and_returns_the_last_metrics(tmp_path):
    path = write_run(tmp_path, make_rows([30, 12, 5, 40]), capacity_tokens=40, steps=2)
    values = json.loads(path.read_text())
    values |= {"data": [{"path": str(tmp_path / "train.jsonl")}], "output": str(tmp_path / "out")}
    runs = (str(path), values, load_config(path))
    first, *others = (read_start(run, [], ranks=1, timeout_seconds=9).config for run in runs)
    assert others == [first, first]
    result, rows = train(values), read_lines(tmp_path / "out/metrics.jsonl")
    assert (result.steps, result.folder, result.stopped_by) == (2, tmp_path / "out", None)
    assert {key: value for key, value in asdict(result.metrics).items() if value is not None} == rows[-1]
    assert (result.first_loss, result.last_loss) == (rows[0]["loss"], rows[-1]["loss"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_calls_back_in_order_and_prints_nothing(tmp_path, capfd, ranks):
    """In a thread that is not the main one, too."""
    heard = tmp_path / f"{os.getpid()}.txt"
    evaluated = {"data": [{"path": "train.jsonl"}], "every_steps": 2}
    path = write_run(tmp_path, make_rows([30, 12, 5, 40]), capacity_tokens=40, eval=evaluated)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(train, path, ranks=ranks, overrides=["steps=2"], callbacks=[Heard(heard)])
        assert running.result(timeout=120).steps == 2
    called = [f"start {ranks}", "step 1 4", "step 2 4", "eval 2", "end 2"]
    assert heard.read_text().splitlines() == [f"{ranks == 1} {each}" for each in called], "all on rank 0"
    assert capfd.readouterr() == ("", "")


def test_verify_returns_how_far_apart_ranks_and_one_process_are(tmp_path):
    path, begun = write_run(tmp_path, make_rows([30, 12, 5, 40])), tmp_path / "plan.json"

    def on_start(check):
        begun.write_text(check.plan.to_json())

    report = verify(path, overrides=["capacity_tokens=24"], on_start=on_start)
    assert report is not None
    assert report.passed
    assert (report.tolerance, report.plan.ranks, report.plan) == (1e-12, 2, Plan.from_json(begun.read_text()))
    assert not (tmp_path / "out").exists()


class Broken(Callback):
    def on_step(self, step):
        raise ValueError(f"at step {step.metrics.step}")


def test_train_names_a_callback_that_raises(tmp_path, capfd):
    path = write_run(tmp_path, make_rows([30, 12, 5, 40]), capacity_tokens=40)
    with pytest.raises(CallbackError, match=r"callback Broken\.on_step: expected a return; got ValueError: at step 1"):
        train(path, ranks=2, callbacks=[Broken()])
    assert 'raise ValueError(f"at step' in capfd.readouterr().err, "the traceback stays in the rank, which prints it"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"overrides": "steps=1"}, "overrides: expected a list of texts key=value; got 'steps=1'"),
        ({"overrides": ["steps"]}, "overrides steps: expected key=value; got 'steps'"),
        ({"ranks": 0, "timeout_seconds": -1}, "(?s)ranks: expected a whole .*; got 0.*timeout_seconds: expected a pos"),
        ({"run": 3}, r"run: expected the path of a run file, its values or a RunConfig; got 3 \(int\)"),
        ({"run": {}, "overrides": ["steps=1"]}, "overrides: expected none, because the settings are not a file"),
    ],
)
def test_train_refuses_wrong_arguments_by_name(tmp_path, arguments, message):
    with pytest.raises(LengthwiseError, match=message):
        train(**{"run": write_run(tmp_path, make_rows([5, 6])), **arguments})
