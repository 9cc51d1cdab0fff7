"""`lengthwise verify`: PASS where the arithmetic holds, and FAIL, loudly, where it was broken on purpose."""

import dataclasses
import json
import re

import pytest
import torch
from testing.small import make_rows, write_model

from lengthwise.attention import heads, partials
from lengthwise.cli.verify import Verify
from lengthwise.core.errors import PlanError
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.engine import batch as batches
from lengthwise.engine import units
from lengthwise.program import MicrobatchProgram
from lengthwise.run import verify, verify_batch
from lengthwise.run.api import read_plan
from lengthwise.run.rounding import FACTOR, TOLERANCES
from lengthwise.session import engine
from run.small_runs import call, job_of, told, write_run
from tiers import more, some


def full(*arguments):
    return "verify", *arguments, "--full"


@pytest.fixture
def run_file(tmp_path):
    rows = make_rows([30, 1, 12, 5, 61, 2])
    rows[2]["labels"] = [-100] * 6 + rows[2]["input_ids"][6:]
    return write_run(tmp_path, rows, global_batch={"sequences": 6})


@pytest.mark.parametrize(("ranks", "precision"), [(3, "bf16"), more(3, "fp64"), more(3, "fp32")])
def test_verify_passes(run_file, capfd, ranks, precision):
    out = told(capfd, *full(run_file, "--ranks", ranks, "--set", f"precision={precision}"))
    assert ("PASS" in out, "FAIL" in out) == (True, False)
    assert {"fp64": "tolerance 1e-12", "fp32": "tolerance 1e-05", "bf16": "tolerance 2 x plain bf16"}[precision] in out
    assert "exercised: rings of " in out


def test_verify_warns_where_nothing_was_cut_and_what_it_says_then_cuts(run_file, capfd):
    """It leaves no output."""
    uncut = ["--set", "planner=packed-dp", "capacity_tokens=64"]
    out = told(capfd, *full(run_file, "--ranks", 2, *uncut))
    cut = re.search(r"warning: no sequence was cut, .*To cut .*train.jsonl:5, of 61 tokens, add (--set .*)", out)
    out = told(capfd, *full(run_file, "--ranks", 2, *uncut, *cut[1].split()))
    assert "exercised: rings of 2 ranks" in out
    assert "warning" not in out
    assert not (run_file.parent / "out").exists()


def test_by_default_few_short_sequences_run_in_every_way_that_the_run_may_choose(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(verify_batch, "SECONDS", 1e-4)
    rows = make_rows([600, 500, *[90] * 20])
    for row in rows[:2]:  # a loss at the end alone, as in a chat
        row["labels"] = [-100] * (len(row["input_ids"]) - 5) + row["input_ids"][-5:]
    model = write_model(tmp_path / "model", num_hidden_layers=3)
    path = write_run(
        tmp_path, rows, model=model, global_batch={"sequences": 22}, capacity_tokens=512,
        offload={"store": "disk", "path": str(tmp_path)},
    )  # fmt: skip
    out = told(capfd, "verify", path, "--ranks", 3)
    changed = next(line for line in out.splitlines() if line.startswith("for this check: "))
    assert " of 22 sequences, cut to at most " in changed
    for said in ("capacity_tokens ", "recompute none, layer, all_but_attention, elementwise", "--full"):
        assert said in changed
    for said in ("rings of ", "heads split in groups of 2", "packs on one rank", "offload of "):
        assert said in next(line for line in out.splitlines() if line.startswith("exercised: "))
    assert "PASS" in out


def hand_plan(run_file, change=lambda plan: None):
    """Pieces beside each other, a ring in odd order, uneven shares, an idle rank: legal, and no planner makes it."""
    path = run_file.parent / "hand.json"
    assert call("plan", "--config", run_file, "--ranks", 3, "--out", path) == 0
    made = json.loads(path.read_text())
    longest, *others = sorted(range(6), key=lambda i: -made["tokens"][i])
    made["requires"] = ["shares"]
    made["capacity"] = 64
    made["microbatches"] = [
        {"pieces": [{"ranks": [2, 0, 1], "sequences": [longest, others[3]], "shares": [1, 2, 0.5]},
                    {"ranks": [1], "sequences": [others[1]]}]},
        {"pieces": [{"ranks": [2, 1], "sequences": [others[0], others[4]]}]},
        {"ranks": [2], "sequences": [others[2]]},
    ]  # fmt: skip
    change(made)
    path.write_text(json.dumps(made))
    return path


def three_heads(plan):
    del plan["microbatches"][0]["pieces"][0]["shares"]
    plan["microbatches"][0]["pieces"][0]["heads"] = 3
    plan["requires"] = ["heads"]


def test_verify_runs_a_plan_of_several_pieces_written_by_hand(run_file, capfd):
    def recompute_each_in_its_way(plan):
        for microbatch, kind in zip(plan["microbatches"], RECOMPUTE_KINDS[:0:-1], strict=True):
            microbatch["recompute"] = kind

    out = told(capfd, *full(run_file, "--ranks", 3, "--plan", hand_plan(run_file, recompute_each_in_its_way)))
    exercised = "exercised: rings of 2, 3 ranks, no heads split, packs on one rank"
    assert [each for each in ("plan: 3 microbatches, 2 rings", exercised, "PASS") if each not in out] == []


PIPELINE = {"schedule": {"kind": "pipeline", "stages": 2, "virtual": 1}, "requires": ["shares", "pipeline"]}


@pytest.mark.parametrize(
    ("change", "keys", "said"),
    [
        (lambda plan: plan["tokens"].__setitem__(0, 1 + plan["tokens"][0]), [], "a plan for 3 ranks and the first"),
        (lambda plan: plan["microbatches"][2].update(ranks=[7]), [], "7"),
        (lambda plan: plan["microbatches"][2].update(offload=0.5), [], "expected a plan without offload, or"),
        (lambda plan: plan.update(PIPELINE), [], "a run without `stages`"),
        (three_heads, [], "a divisor of the model's 4 attention heads; got 3"),
        (lambda plan: None, ["shard=zero3"], "expected a plan of kind waves, for `shard: zero3`"),
    ],
)
def test_verify_refuses_a_plan_that_does_not_fit(run_file, change, keys, said):
    path, job = hand_plan(run_file, change), job_of(run_file, keys, ranks=3)
    with pytest.raises(PlanError, match=re.escape(said)):
        read_plan(path, job, next(job.batches()).lengths)


def merge_that_averages(out, lse, block_out, block_lse):
    """What it would be to average partial results in place of weighing them."""
    out.add_(block_out).div_(2)
    lse.copy_(torch.logaddexp(lse, block_lse.to(lse.dtype)))


def rope_that_starts_anew(self, segments, inner=batches.StepBatch.tensors):
    """Positions follow the shard, not the document."""
    ids, positions, labels = inner(self, segments)
    return ids, positions - (segments[0].start if segments else 0), labels


def tokens_as_they_arrive(piece, lengths, position, inner=heads.group_runs):
    """What it would be to leave the tokens of a group member by member."""
    return sorted(inner(piece, lengths, position), key=lambda run: (run.position, run.start))


def one_block_a_pack(self, rank, hop, inner=MicrobatchProgram.tasks):
    """Packed documents see each other."""
    blocks = []
    for task in inner(self, rank, hop):
        if blocks and blocks[-1].piece == task.piece and self.microbatch.pieces[task.piece].degree == 1:
            blocks[-1] = dataclasses.replace(blocks[-1], q_stop=task.q_stop, kv_stop=task.kv_stop)
        else:
            blocks.append(task)
    return tuple(blocks)


def labels_that_are_not_shifted(self, i, *span):
    """Wrong for all ranks alike: it must not pass because the reference shares it."""
    return self.dataset.read(self.ids[i], *span)[1]


def plain_gradients(*arguments, tensors=batches.StepBatch.tensors, inner=verify.plain_gradients, **keys):
    """The reference before it was broken; in the child, so nothing has to be put back."""
    batches.StepBatch.tensors = tensors
    return inner(*arguments, **keys)


def loss_alone(plan, batch, context, inner=engine.run_part):
    found = inner(plan, batch, context)
    return dataclasses.replace(found, loss_sum=found.loss_sum * 1.0000001)


FAULTS = [
    (partials, "merge_block", merge_that_averages, 3, "heads=off"),  # a ring alone merges
    (heads, "group_runs", tokens_as_they_arrive, 2, "heads=2"),
    (batches.StepBatch, "tensors", rope_that_starts_anew, 3, "heads=off"),
    (MicrobatchProgram, "tasks", one_block_a_pack, 2, "capacity_tokens=60 planner=bytescale-naive"),
    (batches.StepBatch, "shift_labels", labels_that_are_not_shifted, 2, "heads=off"),
    (engine, "run_part", loss_alone, 2, "heads=off"),
]


@pytest.mark.parametrize(("place", "name", "broken", "ranks", "keys"), some(FAULTS, 0, 4, -1))
def test_verify_fails_where_the_arithmetic_is_broken(run_file, capfd, monkeypatch, place, name, broken, ranks, keys):
    """The first by the part of a batch that it takes by default."""
    monkeypatch.setattr(place, name, broken)
    if name == "tensors":
        monkeypatch.setattr(verify, "plain_gradients", plain_gradients)
    given = () if name == "merge_block" else ("--full",)
    out = told(capfd, "verify", run_file, "--ranks", ranks, *given, "--set", *keys.split(), status=1)
    assert ("PASS" in out, "FAIL" in out) == (False, True)


def queries_off_by_a_percent(self, rows, cols, grads, into, inner=partials.PartialGradients.take, **first):
    inner(self, rows, cols, (grads[0] if first["is_first"] else grads[0] * 1.01, *grads[1:]), into, **first)


def sum_in_bf16(self, number, parameter, inner=units.Accumulation._take):
    inner(self, number, parameter)
    if parameter.dtype == torch.bfloat16:
        self._sums[number].copy_(self._sums[number].to(torch.bfloat16))


@pytest.mark.parametrize(
    ("place", "name", "broken", "said"),
    [
        (partials.PartialGradients, "take", queries_off_by_a_percent, "the same plan in fp32"),
        more(units.Accumulation, "_take", sum_in_bf16, "sums of gradients"),
    ],
)
def test_verify_in_bf16_sees_what_is_smaller_than_rounding(run_file, capfd, monkeypatch, place, name, broken, said):
    monkeypatch.setattr(place, name, broken)
    out = told(capfd, *full(run_file, "--ranks", 2, "--set", "precision=bf16", "heads=off"), status=1)
    (line,) = [line for line in out.splitlines() if line.startswith(said)]
    difference, tolerance = re.findall(r"\d[\d.]*(?:e-?\d+)?", line.rpartition("largest")[2])
    assert float(difference) > float(tolerance)


def test_verify_help_has_the_tolerances_of_the_code():
    told = " ".join(Verify.__doc__.split())
    assert f"above {TOLERANCES['fp64']:g} in fp64 or {TOLERANCES['fp32']:.0e} in fp32".replace("e-05", "e-5") in told
    assert f"above {TOLERANCES['bf16']:.0e} + twice".replace("e-03", "e-3") in told
    assert FACTOR == 2


def test_verify_floors_differences_by_the_median_norm():
    """A tensor whose gradient is tiny is measured against 1e-3 of the median norm, not against itself."""
    one = torch.ones(4, dtype=torch.float64)
    expected = {"a": one, "b": one * 2, "c": one * 1e-9}
    gradients = {"a": one, "b": one * 2, "c": one * 2e-9}
    found = verify.gradient_differences(gradients, expected)
    assert found["a"] == found["b"] == 0
    assert found["c"] == pytest.approx(2e-9 / (1e-3 * 2))
    assert not verify.gradient_differences({**gradients, "a": one * torch.nan}, expected)["a"] <= 1.0
