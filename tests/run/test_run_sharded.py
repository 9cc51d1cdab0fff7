"""`shard: zero3` and `stages` of the run file: what ranks read and hold of the weights; verify."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from testing import run_ranks, tiny_family_config
from testing.laid import freed_parameters
from testing.small import make_rows, write_model
from transformers import AutoModelForCausalLM

from lengthwise.models import build_model, find_model, wrapped_layers
from lengthwise.models.own_rows import OwnRows, own_rows
from run.small_runs import call, losses, told, train, write_run
from tiers import more

CPU = torch.device("cpu")
LENGTHS = [37, 11, 5, 7, 2, 90, 64, 33, 12, 8, 9, 23]


def run_file(folder, **keys):
    keys = {"precision": "fp64", "capacity_tokens": 48, "steps": 3, "global_batch": {"sequences": 6}, **keys}
    return write_run(folder, make_rows(LENGTHS), **keys)


def saved_model(folder, family, **changes):
    """Save a model of random weights in several files, tied names once, as the hub has them."""
    config = tiny_family_config(family, changes)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="1MB")
    return sum(each.nbytes for each in model.parameters())


@pytest.mark.parametrize("family", ["llama", more("gemma3_text")])
def test_ranks_read_their_own_rows_of_what_transformers_would_load(tmp_path, family):
    num_bytes = saved_model(tmp_path, family, vocab_size=4096, hidden_size=128, tie_word_embeddings=family != "llama")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or family != "llama"
    source = find_model(str(tmp_path))
    expected = {name: each.detach() for name, each in build_model(source, seed=0).named_parameters()}

    def work(transport):
        model = build_model(source, seed=0, stored=False)
        rows = own_rows(source, model)
        layers = wrapped_layers(model)
        parameters = freed_parameters(model, transport, dtype=torch.float32, device=CPU, layers=layers, read=rows.read)
        with parameters.whole_on_first(trained_only=False):
            whole = {name: each.detach() for name, each in model.named_parameters()} if not transport.rank else {}
            assert all(torch.equal(each, expected[name]) for name, each in whole.items())
            return rows.num_bytes, len(whole)

    found = run_ranks(work, 3)
    assert found[0][1] == len(expected)
    assert sum(read for read, _ in found) == num_bytes
    assert max(read for read, _ in found) <= num_bytes / 3 * 1.02


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), data=st.data())
def test_entries_of_a_tensor_are_read_alone(shape, data, tmp_path_factory):
    folder, whole = tmp_path_factory.mktemp("weights"), torch.randn(shape)
    first, stop = sorted(data.draw(st.lists(st.integers(0, whole.numel()), min_size=2, max_size=2)))
    save_file({"weight": whole}, folder / "model.safetensors")
    rows = OwnRows(folder)
    assert torch.equal(rows.read("weight", first, stop), whole.view(-1)[first:stop])
    assert rows.num_bytes == 4 * (stop - first)


@pytest.mark.exhaustive
def test_what_is_not_there_one_by_one_is_read_by_rank_0(tmp_path):
    saved_model(tmp_path / "model", "qwen3_moe", vocab_size=64)
    source = find_model(str(tmp_path / "model"))
    assert own_rows(source, build_model(source, seed=0, stored=False)) is None
    path = run_file(tmp_path, model=str(tmp_path / "model"), precision="fp32", capacity_tokens=96, steps=1)
    expected = losses(train(path))
    found = losses(train(path, "--ranks", 2, "--overwrite", "--set", "shard=zero3"))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.exhaustive
def test_no_rank_holds_the_whole_model_at_the_start(tmp_path):
    """By the peak of a process's own memory: what it has mapped of files is the system's."""
    num_bytes = 2 * saved_model(tmp_path, "llama", vocab_size=16384, hidden_size=512, num_hidden_layers=6)  # in fp32
    source = find_model(str(tmp_path))

    def work(transport):
        before = own_bytes()
        model = build_model(source, seed=0, stored=False)
        layers, rows = wrapped_layers(model), own_rows(source, model)
        freed_parameters(model, transport, dtype=torch.float32, device=CPU, layers=layers, read=rows.read)
        return own_bytes() - before

    took = max(run_ranks(work, 4))
    assert took < 0.9 * num_bytes, "masters and gradients are two quarters; the rest is one unit, gathered and summed"


def own_bytes():
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_verify_compares_stages_with_one_process(tmp_path, capsys):
    """By the plan that `plan` writes."""
    model = write_model(tmp_path / "model", num_hidden_layers=3, tie_word_embeddings=True)
    path, plan = run_file(tmp_path, model=str(model), stages=2, device="cpu"), tmp_path / "plan.json"
    assert call("plan", "--config", path, "--out", plan, "--ranks", 5) == 2
    assert call("plan", "--config", path, "--out", plan, "--ranks", 4) == 0
    said = " ".join(told(capsys, "verify", path, "--ranks", 4, "--plan", plan).split())
    assert "stages: 2 with 2 ranks a stage, of layers 0 to 1 | 2" in said
    assert "exercised: rings of 2 ranks" in said
    assert "PASS" in said
