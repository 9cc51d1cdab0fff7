"""Files of one number of ranks, read by another; and what is no checkpoint."""

import json
import shutil
from math import nan
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.checkpoint import CheckpointFolder, RunManifest, broken, part, read_state, unfit
from lengthwise.checkpoint.manifest import parameters_of, read_manifest
from lengthwise.checkpoint.part import take_digests, write_part
from lengthwise.checkpoint.saved_folder import begin, commit
from lengthwise.core.errors import OutputError, Problems
from lengthwise.engine.flat_layout import lay_out
from properties import costly

RANKS = st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2), (5, 1), (6, 3), (7, 1), (8, 2), (13, 1)])  # and per node


def shards(layout, values):
    """The shard of each rank, in which parameter i has `values[i]`; -1 where no parameter lies."""
    found = [torch.full((layout.shard_entries,), -1.0) for _ in range(layout.world_size)]
    for rank, shard in enumerate(found):
        for run in layout.runs(rank):
            shard[run.start : run.stop] = values[run.parameter][run.entry : run.entry + run.stop - run.start]
    return found


def with_moment(shard):
    return {"master_weights": shard, "exp_avg": shard * 2}


def save(path, layout, values, *, step=5, names=None, states=with_moment):
    folder = CheckpointFolder(path)
    unfinished = begin(folder.at(step))
    for rank, shard in enumerate(shards(layout, values)):
        write_part(unfinished, rank, states(shard))
    names = names or [f"p{index}" for index in range(len(values))]
    manifest = RunManifest(
        version="0", step=step, ranks=layout.world_size, dtype="float32", first_loss=1.0, loss=0.5, run={"seed": 0},
        data="0" * 64, borders=layout.borders, ranks_per_node=layout.ranks_per_node,
        parameters=parameters_of(layout, names, [(len(value),) for value in values]),
        files=take_digests(unfinished, layout.world_size)[0],
    )  # fmt: skip
    commit(folder.at(step), manifest)
    return folder, manifest


@costly
@given(st.lists(st.integers(0, 400), min_size=1, max_size=8), st.data())
def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path_factory, sizes, data):
    layers = sorted(data.draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes))))
    (old_ranks, old_node), (new_ranks, new_node) = data.draw(RANKS), data.draw(RANKS)
    buckets = data.draw(st.integers(1, 300))
    old = lay_out(sizes, layers, world_size=old_ranks, bucket_entries=buckets, ranks_per_node=old_node)
    order = data.draw(st.permutations(range(len(sizes))))  # of the model that reads
    new = lay_out([sizes[i] for i in order], [0] * len(sizes), world_size=new_ranks, ranks_per_node=new_node)
    values = [torch.arange(size, dtype=torch.float32) + 1000 * index for index, size in enumerate(sizes)]
    path = tmp_path_factory.mktemp("checkpoint")
    save(path, old, values)
    folder, manifest, passed_over = CheckpointFolder(path).newest()
    assert not passed_over
    assert all(broken(folder, manifest, first=rank, every=new_ranks) is None for rank in range(new_ranks))
    names = [f"p{index}" for index in order]
    for rank, wanted in enumerate(shards(new, [values[i] for i in order])):
        state = {"master_weights": torch.full_like(wanted, -1), "exp_avg": torch.full_like(wanted, -2)}
        read_state(folder, manifest, new, names, rank, state)
        assert torch.equal(state["master_weights"], wanted)
        assert torch.equal(state["exp_avg"], wanted * 2)
    shutil.rmtree(path)


@pytest.fixture
def saved(tmp_path):
    layout = lay_out([100, 7], [0, 1], world_size=2)
    return save(tmp_path, layout, [torch.arange(100.0), torch.arange(7.0)])


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


@given(st.integers(0, 1), st.floats(0, 1, exclude_max=True))
def test_a_flipped_bit_anywhere_is_found(tmp_path_factory, rank, place):
    layout = lay_out([100, 7], [0, 1], world_size=2)
    folder, manifest = save(tmp_path_factory.mktemp("flip"), layout, [torch.arange(100.0), torch.arange(7.0)])
    path = folder.at(5) / f"rank-0000{rank}.safetensors"
    flip(path, int(place * path.stat().st_size))
    assert str(path) in str(broken(folder.at(5), manifest))
    assert broken(folder.at(5), manifest, first=1 - rank, every=2) is None, "another rank's file"
    shutil.rmtree(folder.path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda folder: (folder / "rank-00001.safetensors").unlink(), "No such file"),
        (lambda folder: (folder / "rank-00001.safetensors").write_bytes(b"x"), "got 1 bytes"),
        (lambda folder: (folder / "manifest.json").unlink(), "No such file"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "broken JSON"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_passed_over(saved, tmp_path, change, told):
    folder, _ = saved
    layout = lay_out([100, 7], [0, 1], world_size=1)
    save(tmp_path, layout, [torch.arange(100.0), torch.arange(7.0)], step=3)
    change(folder.at(5))
    found, _, (problem,) = folder.newest()
    assert found == folder.at(3)
    assert told in str(problem)
    shutil.rmtree(folder.at(3))
    with pytest.raises((OutputError, Problems), match=told):
        folder.newest()


def test_a_manifest_that_was_changed_is_refused(saved):
    """Values that could be so, which no rule refuses: losses, steps without an update."""
    folder, _ = saved
    path = folder.at(5) / "manifest.json"
    text = path.read_text()
    for key, value in (("loss", 2.5), ("skipped", 1), ("version", "9"), ("sha256", "0" * 64)):
        path.write_text(json.dumps({**json.loads(text), key: value}))
        with pytest.raises(OutputError, match="values that do not fit its sha256"):
            read_manifest(folder.at(5))
    path.write_text(json.dumps(json.loads(text)))
    read_manifest(folder.at(5))


def test_only_names_of_ours_are_checkpoints(saved, tmp_path):
    folder, _ = saved
    for name in ("step-000009.unfinished", "step-7", "step-000008.old", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000010").symlink_to(folder.at(5))
    assert folder.steps() == [5]


UNFIT = {
    "missing": lambda state: {"master_weights": state["master_weights"]},
    "short": lambda state: {**state, "exp_avg_sq": state["exp_avg_sq"][:-1]},
    "2-D": lambda state: {**state, "exp_avg_sq": state["exp_avg_sq"][None]},
    "int64": lambda state: {**state, "exp_avg_sq": state["exp_avg_sq"].long()},
    "NaN at the end": lambda state: {**state, "exp_avg_sq": state["exp_avg_sq"].index_fill(0, torch.tensor(-1), nan)},
    "infinite weights": lambda state: {**state, "master_weights": state["master_weights"] * float("inf")},
    "negative": lambda state: {**state, "exp_avg_sq": -1 - state["exp_avg_sq"]},
}


@pytest.mark.parametrize("change", ["none", *UNFIT])
def test_a_file_whose_states_do_not_fit_is_named_with_the_state(tmp_path, monkeypatch, change):
    monkeypatch.setattr(part, "_AT_ONCE", 16)
    layout = lay_out([100, 7], [0, 1], world_size=2)
    states = [{"master_weights": each, "exp_avg_sq": each.square()} for each in shards(layout, [torch.ones(100)] * 2)]
    changed = [states[0], UNFIT.get(change, dict)(states[1])]
    parts = iter(changed)
    folder, manifest = save(
        tmp_path,
        layout,
        [torch.ones(100), torch.ones(7)],
        states=lambda _: {k: v.clone() for k, v in next(parts).items()},
    )
    state = {name: torch.zeros(1) for name in states[0]}
    found = unfit(folder.at(5), manifest, state)
    assert unfit(folder.at(5), manifest, state, every=2) is None, "of rank 0's"
    assert (found is None) == (change == "none")
    named = "master_weights" if "weights" in change else "exp_avg_sq"
    assert found is None or ("rank-00001.safetensors" in found and named in found)


def test_ranks_that_keep_other_numbers_of_a_parameter_are_named(tmp_path):
    for rank in range(2):
        write_part(tmp_path, rank, {"exp_avg": torch.ones(1)}, {"p0": {"step": 3.0 + rank, "exp_avg": None}})
    with pytest.raises(OutputError, match=r"states of p0: expected the same on all ranks; got .*4\.0.* on rank 1"):
        take_digests(tmp_path, 2)


def test_a_checkpoint_of_an_earlier_version_is_read():
    """Its files lie in `earlier/`, as that version wrote them: two ranks, no word of the optimizer."""
    folder, manifest, _ = CheckpointFolder(Path(__file__).parent / "earlier").newest()
    assert (manifest.step, manifest.skipped, manifest.position, manifest.optimizer) == (7, 1, (1, 3), None)
    values = [torch.arange(size) + start for size, start in ((5, 100.0), (4, 200.0), (3, 300.0))]
    layout = lay_out([3, 5, 4], [0, 1, 2], world_size=1)
    state = {name: torch.zeros(layout.entries) for name in ("master_weights", "exp_avg", "exp_avg_sq")}
    assert broken(folder, manifest) is None
    assert unfit(folder, manifest, state) is None
    read_state(folder, manifest, layout, ["c.bias", "a.weight", "b.weight"], 0, state)
    for run, expected in zip(layout.runs(0), (values[2], values[0], values[1]), strict=True):
        assert torch.equal(state["master_weights"][run.start : run.stop], expected)
        assert torch.equal(state["exp_avg"][run.start : run.stop], -expected)
        assert torch.equal(state["exp_avg_sq"][run.start : run.stop], expected.square())
