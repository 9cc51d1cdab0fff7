"""Our Trainer on ranks against transformers' Trainer in one process: the same batches, losses, weights and files."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from testing.small import plain_loss, relative, small_model
from torch.utils.data import IterableDataset
from trainers import CAPACITY, LENGTHS, arguments, data, difference, in_trainers, padded, trained
from transformers import DataCollatorWithFlattening, Trainer

from lengthwise.integrations.trainer_state import load_state
from lengthwise.integrations.transformers import Trainer as PlannedTrainer
from lengthwise.session import Session
from run.small_runs import call
from session.loops import in_ranks, said
from tiers import more

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # peft reads it

PLANNED = partial(PlannedTrainer, capacity_tokens=CAPACITY)


def test_packed_rows_are_taken_apart(tmp_path):
    """Rows of several documents, as a collator without padding makes them: each document is a sequence."""

    def pack(rows):
        names = {name: [x for row in rows for x in row[name]] for name in ("input_ids", "labels")}
        return {**names, "position_ids": [x for row in rows for x in range(len(row["input_ids"]))]}

    def tensors(examples):
        (example,) = examples
        return {name: torch.tensor([values]) for name, values in example.items()}

    rows, kind = data(LENGTHS[:6]), partial(PlannedTrainer, capacity_tokens=2 * CAPACITY)
    ordered = {"train_sampling_strategy": "sequential", "max_steps": 1}
    sixes = arguments(tmp_path, per_device_train_batch_size=6, **ordered)
    packs = arguments(tmp_path, per_device_train_batch_size=2, **ordered)
    flat = DataCollatorWithFlattening()
    cases = (sixes, rows, padded), (packs, [pack(rows[:3]), pack(rows[3:])], tensors), (sixes, rows, flat)
    losses = [
        trained(kind, args, train_dataset=given, data_collator=collator)["logs"][0]["loss"]
        for args, given, collator in cases
    ]
    assert losses == losses[:1] * 3


def test_the_best_model_is_kept_loaded_and_plain_at_the_end(tmp_path):
    def work(_rank):
        rows = data(LENGTHS[:9])
        changes = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
        best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1}
        args = arguments(tmp_path / "out", 2, **changes, **best)
        trainer = PLANNED(
            model=small_model(torch.float32), args=args, train_dataset=data(), eval_dataset=rows, data_collator=padded
        )
        trainer.train()
        logged = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
        after = trainer.evaluate()["eval_loss"]
        generated = trainer.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
        return logged, after, tuple(generated.shape)

    for logged, after, generated in in_trainers(work, 2, tmp_path):
        assert len(logged) == 2
        assert after == min(logged)
        assert generated == (1, 7)
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 1


SAVING = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
SAVING |= {"max_steps": 4, "warmup_steps": 1}  # a schedule that starts anew has other rates


@pytest.mark.parametrize("plain_too", [False, more(True)])
def test_run_goes_on_from_a_checkpoint_on_any_number_of_ranks(tmp_path, plain_too):
    """To the same bits on as many ranks; on others, and between planned and plain, within rounding.

    A plain Trainer goes on from what is exported of it, in the checkpoint's folder, as the page says.
    """

    def work(ranks, folder, resume, _rank):
        args = arguments(tmp_path / folder, ranks or 1, **SAVING)
        kind = partial(PlannedTrainer, capacity_tokens=2 * CAPACITY // ranks) if ranks else Trainer
        found = trained(kind, args, model=small_model(torch.float32), resume=resume)
        return found["weights"], [log["loss"] for log in found["logs"] if "loss" in log]

    whole, *_ = in_trainers(partial(work, 2, "two", None), 2, tmp_path)
    middle = str(tmp_path / "two/checkpoint-2")
    for weights, losses in in_trainers(partial(work, 2, "again", middle), 2, tmp_path):
        assert all(torch.equal(weights[name], whole[0][name]) for name in whole[0])
        assert losses == whole[1][2:]
    found = in_trainers(partial(work, 1, "one", middle), 1, tmp_path)
    if plain_too:
        assert call("checkpoint", "export", f"{middle}/lengthwise", f"{middle}/optimizer.pt") == 0
        plain, *_ = in_trainers(partial(work, 0, "plain", None), 1, tmp_path)
        found += in_trainers(partial(work, 0, "plain2", middle), 1, tmp_path)
        found += in_trainers(partial(work, 2, "two2", str(tmp_path / "plain/checkpoint-2")), 2, tmp_path)
        assert difference(plain[0], whole[0]) < 2e-5
    for weights, losses in found:
        assert difference(weights, whole[0]) < 2e-5
        assert max(map(relative, losses, whole[1][2:])) < 2e-6
    assert len(list(Path(middle, "lengthwise").glob("rank-*"))) == 2
    assert json.loads(Path(middle, "trainer_state.json").read_text())["global_step"] == 2


def test_parts_that_an_evaluation_left_are_not_trained(tmp_path):
    """Neither is a best model loaded where parameters lie over the ranks: refused when the Trainer is made."""
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}

    def work(_rank):
        rows = {"train_dataset": data(), "eval_dataset": data(LENGTHS[:3]), "data_collator": padded}
        for cut in ({"shard": "zero3"}, {"stages": 2}):
            told = said(partial(PLANNED, model=small_model(), args=arguments(tmp_path, 2, **best), **cut, **rows))
            assert "under shard zero3, hybrid or stages it would load weights" in told
        whole = PLANNED(model=small_model(), args=arguments(tmp_path, 2, **best), **rows)
        assert whole._session_options["shard"] == "zero1"
        trainer = PLANNED(model=small_model(torch.float32), args=arguments(tmp_path, 2), shard="zero3", **rows)
        found = trainer.evaluate()["eval_loss"]
        assert "one training with sharded parameters" in said(trainer.train)
        return relative(found, plain_loss(small_model(torch.float32), rows["eval_dataset"], torch.float32))

    assert max(in_trainers(work, 2, tmp_path)) < 2e-6


def test_a_checkpoint_that_cannot_be_read_is_refused_on_all_ranks(tmp_path):
    files = {
        "optimizer.pt": "expected a checkpoint of this trainer; got no scheduler.pt. Take a checkpoint",
        "scheduler.pt": "optimizer.pt: expected the state of a plain optimizer; got ",
        "master_weights.safetensors": "got master_weights.safetensors, of an earlier",
    }

    def work(rank):
        trainer = SimpleNamespace(args=SimpleNamespace(process_index=rank), state=SimpleNamespace(global_step=2))
        model = small_model()
        with Session(model, torch.optim.SGD(model.parameters()), capacity_tokens=64) as session:
            for name, words in files.items():
                (tmp_path / name).write_bytes(b"broken")
                assert words in said(lambda: load_state(trainer, session, str(tmp_path)))
                session.sum_over_ranks(torch.zeros(1))  # all have read it

    in_ranks(work, 2, tmp_path)


def scores(of):
    """Return numbers of all that `compute_metrics` gets: which labels are most likely."""
    given, found = torch.tensor(of.label_ids[:, 1:]), torch.tensor(of.predictions)[:, :-1]
    picked = found == given.clamp(min=0)
    numbers = {"size": found.numel(), "sum": (picked * (given >= 0)).sum().item(), "losses": len(of.losses)}
    return {**numbers, "labels": of.label_ids.sum().item(), "inputs": of.inputs.clip(0).sum().item()}


def test_metrics_of_an_evaluation_get_the_logits_of_all_rows(tmp_path):
    def work(kind, ranks, _rank):
        args = arguments(tmp_path / "out", ranks, include_for_metrics=["inputs", "loss"])
        given = {"compute_metrics": scores, "data_collator": padded}
        given["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
        found = kind(model=small_model(torch.float32), args=args, **given).evaluate(data(LENGTHS[:7]))
        return [found[f"eval_{name}"] for name in ("size", "sum", "losses", "labels", "inputs")]

    (expected,) = in_trainers(partial(work, Trainer, 1), 1, tmp_path)
    for found in in_trainers(partial(work, PLANNED, 2), 2, tmp_path):
        assert found == pytest.approx(expected, rel=1e-5)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data()[:5])


def test_batches_left_at_the_end_of_a_stream_add_to_the_next_update(tmp_path):
    def work(kind, _rank):
        changes = {"max_steps": 2, "gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}
        args, stream = arguments(tmp_path, per_device_train_batch_size=2, **changes), Stream()
        found = trained(kind, args, train_dataset=stream)
        names = ("loss", "grad_norm", "learning_rate", "num_input_tokens_seen", "epoch")
        return found["events"], [log[name] for log in found["logs"][:2] for name in names]

    ((events, expected),) = in_trainers(partial(work, Trainer), 1, tmp_path)
    ((heard, found),) = in_trainers(partial(work, partial(PlannedTrainer, capacity_tokens=2 * CAPACITY)), 1, tmp_path)
    assert heard == events
    assert found == pytest.approx(expected, rel=1e-4)
