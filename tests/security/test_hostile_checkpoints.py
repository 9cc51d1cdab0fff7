"""Manifests from outside: nothing outside the checkpoint's folder is read, and nothing large is made."""

import json
import os
import shutil

import pytest
import torch

from checkpoint.test_checkpoint_parts import save
from lengthwise.checkpoint import CheckpointFolder
from lengthwise.checkpoint.manifest import signed
from lengthwise.core.errors import OutputError, Problems
from lengthwise.engine.flat_layout import lay_out
from tiers import more

RANK = "rank-00000.safetensors"


@pytest.fixture
def checkpoints(tmp_path):
    layout = lay_out([100, 7], [0, 1], world_size=1)
    save(tmp_path / "checkpoints", layout, [torch.arange(100.0), torch.arange(7.0)])
    return tmp_path / "checkpoints"


def rename(name):
    def change(manifest, folder):
        (folder.parent / "outside").mkdir(exist_ok=True)
        shutil.copy(folder / RANK, folder.parent / "outside" / RANK)
        name_of = name.format(folder=folder)
        manifest["files"] = {name_of: manifest["files"][RANK]}

    return change


def setting(*path, to):
    def change(manifest, _folder):
        inside = manifest
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = to

    return change


def link(manifest, folder):
    shutil.move(folder / RANK, folder.parent / "elsewhere")
    (folder / RANK).symlink_to(folder.parent / "elsewhere")


def pipe(manifest, folder):
    (folder / RANK).unlink()
    os.mkfifo(folder / RANK)


def deep(levels):
    return json.loads("[" * levels + "]" * levels)


OF_ALL = {"params": ["p0", "p1"]}
HOSTILE = {
    "parent": rename("../outside/rank-00000.safetensors"),
    "absolute": rename("{folder}/../outside/rank-00000.safetensors"),
    "folder within": rename("./rank-00000.safetensors"),
    "another name": rename("config.yaml"),
    "device": rename("/dev/zero"),
    "link": link,
    "pipe": pipe,
    "many ranks": setting("ranks", to=2**60),
    "no rank": setting("ranks", to=0),
    "huge file": setting("files", RANK, "num_bytes", to=2**60),
    "huge number": setting("step", to=10**400),
    "huge borders": setting("borders", to=[0, 2**62]),
    "huge shape": setting("parameters", 0, "shape", to=[2**40, 2**40]),
    "endless shape": setting("parameters", 0, "shape", to=[2] * 100_000),
    "many parameters": setting("parameters", to=[{}] * 100_000),
    "outside the file": setting("parameters", 0, "start", to=2**60),
    "nested": setting("run", to={"model": deep(900)}),
    "not a number": setting("loss", to=float("nan")),
    "unknown key": setting("loader", to="pickle"),
    "another schema": setting("schema", to="lengthwise.checkpoint/2"),
    "no step": setting("step", to=0),
    "more ranks than files": setting("ranks", to=3),
    "another precision": setting("dtype", to="bfloat16"),
    "other borders": setting("borders", to=[0, 64]),
    "a path for data": setting("data", to="../x"),
    "groups of nothing": setting("optimizer", to={"kind": "AdamW", "groups": [{"params": 7}], "states": {}}),
    "nested groups": setting("optimizer", to={"kind": "AdamW", "groups": [{"params": deep(900)}], "states": {}}),
    "states of nothing": setting("optimizer", to={"kind": "AdamW", "groups": [OF_ALL], "states": {"x" * 5000: {}}}),
    "states that are weights": setting(
        "optimizer", to={"kind": "AdamW", "groups": [OF_ALL], "states": {"p0": {"master_weights": None}}}
    ),
    "more skipped than steps": setting("skipped", to=99),
}


@pytest.mark.parametrize("hostile", [more(name) if name == "many parameters" else name for name in HOSTILE])
def test_hostile_manifests_are_refused_by_name(checkpoints, hostile):
    (folder,) = checkpoints.iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    HOSTILE[hostile](manifest, folder)
    (folder / "manifest.json").write_text(signed(manifest))
    with pytest.raises((OutputError, Problems)) as caught:
        CheckpointFolder(checkpoints).newest()
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_manifest_that_nests_without_end_or_is_no_file_is_refused(checkpoints):
    (folder,) = checkpoints.iterdir()
    path = folder / "manifest.json"

    def refused():
        with pytest.raises(OutputError, match=r"manifest\.json"):
            CheckpointFolder(checkpoints).newest()

    for text in ("[" * 1_000_000, '{"a":' * 100_000, "", "\0" * 1000):
        path.write_text(text)
        refused()
    path.unlink()
    path.symlink_to("/dev/zero")
    refused()
    path.unlink()
    os.mkfifo(path)
    refused()
