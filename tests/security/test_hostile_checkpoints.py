"""Manifests from outside: nothing outside the checkpoint's folder is read, and nothing large is made."""

import json
import os
import shutil

import pytest

import lengthwise
from lengthwise.checkpoint import CheckpointFolder
from lengthwise.checkpoint.manifest import signed
from lengthwise.core.errors import OutputError, Problems
from run.small_runs import make_rows, write_run
from tiers import some

RANK = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    path = write_run(folder, make_rows([9, 12, 5]), checkpoint={"every_steps": 3, "background": False})
    lengthwise.train(path)
    return folder / "out/checkpoints"


@pytest.fixture
def checkpoints(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "checkpoints")
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
}


@pytest.mark.parametrize("hostile", some(HOSTILE, 0, 5, 10, 15))
def test_hostile_manifests_are_refused_by_name(checkpoints, hostile):
    (folder,) = checkpoints.iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    HOSTILE[hostile](manifest, folder)
    (folder / "manifest.json").write_text(signed(manifest))
    with pytest.raises((OutputError, Problems)) as caught:
        CheckpointFolder(checkpoints).newest()
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_manifest_that_nests_without_end_is_refused(checkpoints):
    (folder,) = checkpoints.iterdir()
    for text in ("[" * 1_000_000, '{"a":' * 100_000, "", "\0" * 1000):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(OutputError, match=r"manifest\.json"):
            CheckpointFolder(checkpoints).newest()


@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
def test_manifest_that_is_no_file_is_refused(checkpoints, tmp_path, kind):
    (folder,) = checkpoints.iterdir()
    path = folder / "manifest.json"
    path.rename(tmp_path / "manifest.json")
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(
        "/dev/zero" if kind == "device" else tmp_path / "manifest.json"
    )
    with pytest.raises(OutputError, match=r"manifest\.json"):
        CheckpointFolder(checkpoints).newest()
