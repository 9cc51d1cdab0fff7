"""Reports to experiment trackers: what arrives, from whom, and that no tracker takes a run with it."""

import pytest
from testing.small import make_rows

import lengthwise
from lengthwise.core import packages
from lengthwise.core.errors import Problems
from lengthwise.run import trackers
from run.small_runs import broken_off, call, losses, read_lines, write_run

LENGTHS = [30, 12, 5, 40]
EVALUATED = {"data": [{"path": "train.jsonl"}], "every_steps": 2}


def run_of(folder, tracker="mlflow", **keys):
    return write_run(folder, make_rows(LENGTHS), capacity_tokens=40, report_to=tracker, **keys)


def scalars_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.exhaustive
def test_trackers_tensorboard_reads_back_the_metrics_of_every_step_once_where_a_run_goes_on(tmp_path):
    pytest.importorskip("tensorboard")
    keys = {"steps": 5, "checkpoint": {"every_steps": 2, "background": False}, "eval": EVALUATED}
    path = run_of(tmp_path, "tensorboard", **keys)
    broken_off(path, 1, after=3)
    lengthwise.train(path, ranks=2, resume=True)
    found, rows = scalars_of(tmp_path / "out/tensorboard"), read_lines(tmp_path / "out/metrics.jsonl")
    for name in ("loss", "grad_norm", "learning_rate", "imbalance_ratio", "peak_memory_bytes"):
        values = [row[{"learning_rate": "lr"}.get(name, name)] for row in rows]
        assert [step for step, _ in found[f"train/{name}"]] == [1, 2, 3, 4, 5]
        assert [value for _, value in found[f"train/{name}"]] == pytest.approx(values, rel=1e-6), name
    (every,) = [found[tag] for tag in found if tag.startswith("eval/")]
    assert [step for step, _ in every] == [2, 4, 5]
    assert [value for _, value in every] == pytest.approx(losses_of_evaluations(tmp_path), rel=1e-6)
    lengthwise.train(path, overwrite=True, overrides=["steps=1"])
    assert [step for step, _ in scalars_of(tmp_path / "out/tensorboard")["train/loss"]] == [1], "the earlier run went"
    assert len(list((tmp_path / "out/tensorboard").iterdir())) == 1, "of rank 0 alone"


def losses_of_evaluations(folder):
    return [row["loss"] for row in read_lines(folder / "out/eval.jsonl")]


class Recording:
    """A tracker's callback in place of transformers' own."""

    def __init__(self, *, fails=None):
        self.calls, self._fails = [], fails

    def __getattr__(self, method):
        def hear(_arguments, state, _control, *, model, logs=None):
            self.calls.append((method, state.global_step, logs))
            if self._fails and method == self._fails[0] and state.global_step >= self._fails[1]:
                raise RuntimeError("no connection")

        return hear


def put_in_place(monkeypatch, recording):
    monkeypatch.setattr(trackers, "_callback_of", lambda _name, _folder, _step: recording)
    monkeypatch.setattr(packages, "TRACKER_PACKAGES", dict.fromkeys(packages.TRACKER_PACKAGES, ("torch",)))
    return recording


def test_trackers_call_a_callback_as_its_trainer_would(tmp_path, monkeypatch):
    heard = put_in_place(monkeypatch, Recording())
    lengthwise.train(run_of(tmp_path, ["mlflow"], eval=EVALUATED))
    calls = [(method, step) for method, step, _ in heard.calls]
    ends = [("on_log", 3), ("on_log", 3), ("on_train_end", 3)]
    assert calls == [("on_train_begin", 0), ("on_log", 1), ("on_log", 2), ("on_log", 2), *ends]
    assert heard.calls[3][2] == {"eval_loss": losses_of_evaluations(tmp_path)[0]}


def test_trackers_that_fail_are_named_once_and_end_no_run(tmp_path, monkeypatch, capsys):
    put_in_place(monkeypatch, Recording(fails=("on_log", 2)))
    assert call("train", run_of(tmp_path)) == 0
    said = "no more reports to mlflow: RuntimeError: no connection; training is not affected"
    assert " ".join(capsys.readouterr().out.split()).count(said) == 1
    assert len(losses(tmp_path / "out")) == 3
    assert (tmp_path / "out/model/config.json").exists()


def test_trackers_without_their_package_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    missing = {"mlflow": ("no-such-mlflow", "nor-this"), "wandb": ("no-such-wandb",)}
    monkeypatch.setattr(packages, "TRACKER_PACKAGES", missing)
    with pytest.raises(Problems) as told:
        lengthwise.train(run_of(tmp_path, ["mlflow", "wandb"]))
    assert "the package no-such-mlflow, which mlflow needs" in str(told.value)
    assert "pip install no-such-wandb, or take wandb out of `report_to`" in str(told.value)
    assert not (tmp_path / "out").exists()
