"""The parts of `lengthwise demo`; all of it runs in `make demo`."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from testing.small import write_model

from lengthwise.cli import demo
from lengthwise.core.errors import OutputError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.run.callbacks import TrainResult
from lengthwise.run.verify import VerifyReport
from run.small_runs import call

PLAN = Plan(
    ranks=4, layers=1, capacity=8, tokens=(3,),
    microbatches=(Microbatch(pieces=(Piece(ranks=(0,), sequences=(0,)),)),),
)  # fmt: skip
RESULT = TrainResult(
    steps=20, num_tokens=300_000, seconds=20.0, first_loss=5.0, last_loss=3.0, metrics=None, parameters=1,
    stopped_by=None, folder=Path("run"),
)  # fmt: skip


def test_demo_folder_is_a_fresh_one_each_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo.time, "strftime", lambda _: "demo-20260101-000000")
    folders = [demo.fresh_folder(None) for _ in range(4)]
    assert len(set(folders)) == 4
    assert all(folder.is_dir() and not list(folder.iterdir()) for folder in folders)
    (tmp_path / "file").write_text("mine")
    for name in ("runs", "file", "file/below"):
        with pytest.raises(OutputError, match=name):
            demo.fresh_folder(tmp_path / name)
    assert demo.fresh_folder(tmp_path / "deep/er") == tmp_path / "deep/er"
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("difference", "opened", "stopped_by", "status"),
    [
        (1e-15, True, None, 0),
        (1e-9, True, None, 1),
        (float("nan"), True, None, 1),
        (1e-15, False, None, 1),
        (1e-15, True, 2, 130),
    ],
)
def test_demo_fails_only_when_a_check_failed(tmp_path, monkeypatch, capsys, difference, opened, stopped_by, status):
    for name in ("_standard_library", "_show_data", "_show_plans", "_compare"):
        monkeypatch.setattr(demo, name, lambda *_: None)
    monkeypatch.setattr(demo, "write_run_file", lambda folder: folder / "demo.yaml")
    monkeypatch.setattr(demo, "_train", lambda _: dataclasses.replace(RESULT, stopped_by=stopped_by))
    monkeypatch.setattr(demo, "_open", lambda *_: opened)
    found = VerifyReport(plan=PLAN, loss=5.0, reference_loss=5.0, gradients={"w": difference}, tolerance=1e-12)

    def verify(*_, on_start, **__):
        on_start(SimpleNamespace(plan=PLAN))
        return found

    monkeypatch.setattr("lengthwise.run.api.verify", verify)
    assert call("demo", "--output", tmp_path / "demo") == status
    out = capsys.readouterr().out
    assert ("PASS" in out, "FAIL" in out) == (stopped_by is None and difference == 1e-15, difference != 1e-15)
    assert ("in fp64" in out) == (stopped_by is None)
    assert stopped_by is None or "Next" not in out


def test_demo_fails_when_the_saved_model_is_another(tmp_path, capsys):
    folder, lines = write_model(tmp_path / "model"), []
    true_size = 2 * 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32
    for parameters, verdict in ((RESULT.parameters, "FAIL"), (true_size, "PASS")):
        result = dataclasses.replace(RESULT, parameters=parameters)
        assert demo._open(folder, result, lambda text, **_: lines.append(text)) == (verdict == "PASS")
        assert re.findall("PASS|FAIL", lines[-1]) == [verdict]
