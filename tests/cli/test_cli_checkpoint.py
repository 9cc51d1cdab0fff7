"""`lengthwise checkpoint`: what is there, whether it is whole, and a model folder from it."""

import shutil

import pytest
import torch
from testing.small import make_rows

import lengthwise
from run.small_runs import call, write_run
from tiers import more

KEYS = {"steps": 6, "capacity_tokens": 64, "checkpoint": {"every_steps": 2, "background": False}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = write_run(tmp_path_factory.mktemp("run"), make_rows([30, 12, 5, 60]), **KEYS)
    lengthwise.train(path, ranks=2)
    return path.parent / "out"


def flip(path, place=-3):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


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
    assert call("checkpoint", "list", trained) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["2", "2"], ["4", "2"], ["6", "2"]]
    assert call("checkpoint", "verify", trained) == 0
    assert "3 checkpoints, none damaged; every byte was read" in capsys.readouterr().out
    assert call("checkpoint", "verify", trained, "--step", 4) == 0
    assert "1 checkpoint, none damaged" in capsys.readouterr().out
    assert call("checkpoint", "verify", trained / "checkpoints/step-000004") == 0
    assert "1 checkpoint, none damaged" in capsys.readouterr().out


def test_what_is_broken_is_named_and_the_status_says_it(own, capsys):
    flip(own / "checkpoints/step-000004/rank-00001.safetensors")
    (own / "checkpoints/step-000006/manifest.json").write_text("{}")
    assert call("checkpoint", "verify", own) == 1
    said = capsys.readouterr().out
    assert "step-000002: whole" in said
    assert "step-000004: DAMAGED: " in said
    assert "rank-00001.safetensors: SHA-256" in said
    assert "step-000006: DAMAGED: " in said
    assert "3 checkpoints, 2 damaged" in said
    assert call("checkpoint", "verify", own, "--step", 2) == 0
    assert call("checkpoint", "list", own) == 1
    said = capsys.readouterr().out
    assert "step-000006/manifest.json" in said
    (own / "checkpoints/step-000002/rank-00000.safetensors").unlink()
    assert call("checkpoint", "list", own) == 1
    assert "No such file" in capsys.readouterr().out


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
    assert call("checkpoint", "export", own, tmp_path / "new") == 2
    assert "precision: 'fp64' (text) then, 'fp32'" in capsys.readouterr().err
    config.write_text(text)
    flip(own / "checkpoints/step-000006/rank-00000.safetensors")
    assert call("checkpoint", "export", own, tmp_path / "new") == 2
    err = capsys.readouterr().err
    assert "SHA-256" in err
    assert "--step" in err
    assert call("checkpoint", "export", own / "checkpoints/step-000006", tmp_path / "new") == 2
    assert "undamaged files with an optimizer's groups; got" in capsys.readouterr().err
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
