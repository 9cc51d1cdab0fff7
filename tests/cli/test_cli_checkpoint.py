"""`lengthwise checkpoint`: what is there, whether it is whole, and a model folder from it."""

import shutil

import pytest
import torch
from testing.small import make_rows

import lengthwise
from checkpoint.test_checkpoint_parts import flip
from run.small_runs import call, told, write_run
from tiers import more

KEYS = {"steps": 6, "capacity_tokens": 64, "checkpoint": {"every_steps": 2, "background": False}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = write_run(tmp_path_factory.mktemp("run"), make_rows([30, 12, 5, 60]), **KEYS)
    lengthwise.train(path, ranks=2)
    return path.parent / "out"


@pytest.fixture
def own(trained):
    """A run whose checkpoints a test may harm: at its own place, as it was."""
    kept = trained.with_name("kept")
    if not kept.exists():
        shutil.copytree(trained, kept)
    yield trained
    shutil.rmtree(trained)
    shutil.copytree(kept, trained)


def test_checkpoints_are_listed_and_verified(trained, capsys):
    rows = [line.split() for line in told(capsys, "checkpoint", "list", trained).splitlines()[2:]]
    assert [row[:2] for row in rows] == [["2", "2"], ["4", "2"], ["6", "2"]]
    said = told(capsys, "checkpoint", "verify", trained)
    assert "3 checkpoints, none damaged; every byte was read" in said
    for one in ((trained, "--step", 4), (trained / "checkpoints/step-000004",)):
        assert "1 checkpoint, none damaged" in told(capsys, "checkpoint", "verify", *one)


def test_what_is_broken_is_named_and_the_status_says_it(own, capsys):
    flip(own / "checkpoints/step-000004/rank-00001.safetensors", -3)
    (own / "checkpoints/step-000006/manifest.json").write_text("{}")
    said = told(capsys, "checkpoint", "verify", own, status=1)
    damaged = ("step-000004: DAMAGED: ", "rank-00001.safetensors: SHA-256", "step-000006: DAMAGED: ")
    for each in ("step-000002: whole", *damaged, "3 checkpoints, 2 damaged"):
        assert each in said
    told(capsys, "checkpoint", "verify", own, "--step", 2)
    assert "step-000006/manifest.json" in told(capsys, "checkpoint", "list", own, status=1)
    (own / "checkpoints/step-000002/rank-00000.safetensors").unlink()
    assert "No such file" in told(capsys, "checkpoint", "list", own, status=1)


@pytest.mark.parametrize("lora", [None, more({"r": 4})])
def test_an_exported_checkpoint_is_the_model_of_the_run(trained, tmp_path, lora):
    if lora:
        lengthwise.train(write_run(tmp_path, make_rows([30, 12, 5, 60]), lora=lora, **KEYS), ranks=2)
    output, exported = tmp_path / "out" if lora else trained, tmp_path / "exported"
    assert call("checkpoint", "export", output, exported) == 0
    whole = output / "model"
    assert sorted(each.name for each in exported.iterdir()) == sorted(each.name for each in whole.iterdir())
    for file in whole.iterdir():
        assert (exported / file.name).read_bytes() == file.read_bytes(), file.name


def test_an_export_of_a_broken_checkpoint_or_of_other_settings_writes_nothing(own, tmp_path, capsys):
    config = own / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("precision: fp64", "precision: fp32"))
    asked = ("checkpoint", "export", own, tmp_path / "new")
    assert "precision: 'fp64' (text) then, 'fp32'" in told(capsys, *asked, status=2)
    config.write_text(text)
    flip(own / "checkpoints/step-000006/rank-00000.safetensors", -3)
    err = told(capsys, *asked, status=2)
    assert "SHA-256" in err
    assert "--step" in err
    err = told(capsys, "checkpoint", "export", own / "checkpoints/step-000006", tmp_path / "new", status=2)
    assert "undamaged files with an optimizer's groups; got" in err
    assert not list(tmp_path.glob("new*"))
    assert call("checkpoint", "export", own / "checkpoints/step-000004", tmp_path / "new") == 0
    assert torch.load(tmp_path / "new", weights_only=True)["steps"] == 4


@pytest.mark.parametrize(("arguments", "said"), [
    (("export", "{out}"), "TO: expected a folder or file with export"),
    (("list", "{out}", "--step", 2), "--step: expected none for list"),
    (("verify", "{out}", "--step", 3), "after step 3; got checkpoints after 2, 4, 6"),
    (("export", "{out}", "{new}", "--step", 3), "after step 3; got checkpoints after 2, 4, 6"),
    (("export", "{out}", "{out}"), "expected a new folder"),
    (("export", "{out}/checkpoints/step-000004", "{out}"), "expected a new file; got an existing one"),
    (("export", "{out}/checkpoints/step-000004", "{new}/x/y"), "expected a file that can be written"),
    (("list", "{new}"), "expected a run's output folder with checkpoints"),
    (("export", "{new}", "{new}/x"), "expected a checkpoint to resume from"),
], ids=str)  # fmt: skip
def test_what_is_asked_wrongly_is_told(trained, tmp_path, capsys, arguments, said):
    places = {"out": trained, "new": tmp_path / "new"}
    assert call("checkpoint", *(str(each).format(**places) for each in arguments)) in (1, 2)
    assert said in capsys.readouterr().err
