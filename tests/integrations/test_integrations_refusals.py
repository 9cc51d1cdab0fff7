"""What a planned Trainer cannot keep is refused when it is made, all at once; other mistakes at the first step."""

import copy
import dataclasses
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from preferences import family_model
from testing.small import small_model
from trainers import CAPACITY, Kept, arguments, data, difference, in_trainers, padded, trained, wrong_places
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from lengthwise.core.errors import ConfigError, DataError, Problems
from lengthwise.integrations.arguments import KEPT, REFUSED, WITHOUT_EFFECT, problems_of
from lengthwise.integrations.batches import rows_of
from lengthwise.integrations.transformers import PlannedTrainerMixin
from lengthwise.integrations.transformers import Trainer as PlannedTrainer
from session.loops import said


def planned(args, **options):
    given = {"train_dataset": data(), "data_collator": padded, "capacity_tokens": 2 * CAPACITY, **options}
    return PlannedTrainer(model=given.pop("model", None) or small_model(torch.float32), args=args, **given)


def test_every_argument_stands_in_one_table():
    names = [each.name for each in dataclasses.fields(TrainingArguments)]
    tables = [KEPT, WITHOUT_EFFECT.keys(), REFUSED.keys()]
    assert [(name, sum(name in table for table in tables)) for name in names] == [(name, 1) for name in names]


def test_the_page_names_all_that_is_refused():
    page = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text()
    for name, (_, why) in REFUSED.items():
        assert re.search(rf"\| `{name}`.* \| .* \| {re.escape(why)} \|", page), name


OTHERS = {
    "deepspeed": {"zero_optimization": {"stage": 2}}, "fsdp": True, "parallelism_config": object(),
    "debug": ["underflow_overflow"], "neftune_noise_alpha": 5.0, "train_sampling_strategy": "group_by_length",
    "optim": "adafactor", "optim_target_modules": ["q_proj"], "torch_empty_cache_steps": 4,
    "label_names": ["start_positions"],
}  # fmt: skip


def test_all_that_cannot_be_kept_is_refused_in_one_message(tmp_path):
    args = arguments(tmp_path)
    for name in REFUSED:
        setattr(args, name, OTHERS.get(name, True))  # as they are after `__post_init__`, which would start some
    args.activation_checkpointing_kwargs = {"every_n_layers": 2, "recompute": "some"}
    kwargs = {f"activation_checkpointing_kwargs.{name}" for name in ("every_n_layers", "recompute")}
    assert wrong_places(partial(planned, args)) == {*REFUSED, *kwargs}
    (problem,) = problems_of(arguments(tmp_path, activation_checkpointing_kwargs={"recompute": "elementwise"}))
    assert "nothing reads it" in problem.got
    for name in [each.value for each in OptimizerNames if "bit" in each.value or "bnb" in each.value]:
        (problem,) = problems_of(arguments(tmp_path, optim=name))
        assert (problem.where, name in problem.got) == ("optim", True)


def test_ranks_that_the_arguments_do_not_count_are_refused(tmp_path):
    def work(_rank):
        trainer = planned(arguments(tmp_path, use_cpu=False))  # accelerate then joins no ranks on CPUs
        assert "world_size: expected arguments of the 2 processes" in said(trainer.train)

    in_trainers(work, 2, tmp_path)


def test_fused_layers_are_those_of_the_session_and_transformers_is_not_patched(tmp_path):
    args = arguments(tmp_path, use_liger_kernel=True)
    trainer = planned(args)
    assert (args.use_liger_kernel, trainer.args.use_liger_kernel) == (True, False)
    with pytest.raises(ConfigError, match=r"fused_layers: .* got Liger's kernels are for GPUs"):
        trainer.train()
    with pytest.raises(ConfigError, match="fused_layers: expected auto or liger beside use_liger_kernel; got off"):
        planned(args, fused_layers="off")


def test_an_argument_of_a_later_version_is_refused_unless_it_has_its_default(tmp_path, monkeypatch):
    args, field = arguments(tmp_path), dataclasses.field(default=3)
    field.name, args.halves, known = "halves", 3, dataclasses.fields(args)
    monkeypatch.setattr(dataclasses, "fields", lambda _: (*known, field))
    assert problems_of(args) == []
    args.halves = 4
    (problem,) = problems_of(args)
    assert problem.where == "halves"


def test_what_shows_only_in_use_is_refused_then(tmp_path):
    """A loss that is a mean of its microbatch, a loader of the user's own, predictions, data without labels."""

    def of_mean(_self, model, inputs, _return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss / num_items_in_batch

    def of_sum(_self, model, inputs, _return_outputs=False, num_items_in_batch=None):
        return model(**inputs, num_items_in_batch=1.0).loss

    def own_loader(self):
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=4, collate_fn=padded)

    for name, function, words in (
        ("compute_loss", of_mean, "for two equal rows"),
        ("compute_loss", of_sum, "half the loss for twice the num_items_in_batch"),
        ("get_train_dataloader", own_loader, "get_train_dataloader"),
    ):
        kind = type("Own", (PlannedTrainerMixin, Trainer), {name: function})
        assert words in said(partial(trained, kind, arguments(tmp_path), capacity_tokens=2 * CAPACITY))
    mean = planned(arguments(tmp_path), compute_loss_func=lambda outputs, *_, **__: outputs.logits.mean())
    assert "for two equal rows" in said(mean.train)
    assert "predict" in said(lambda: planned(arguments(tmp_path)).predict(data()))
    rows = [{**row, "labels": [-100] * len(row["labels"])} for row in data()]
    assert "a token with a label" in said(planned(arguments(tmp_path), eval_dataset=rows).evaluate)


def test_wrong_arguments_of_the_session_are_refused_beside_the_trainers_when_it_is_made(tmp_path):
    wrong = {"shard": "zero4", "planner": "foo", "heads": "many", "capacity_tokens": 0, "attention": "flash9"}
    args = arguments(tmp_path)
    args.fp16 = True
    with pytest.raises(Problems) as raised:
        planned(args, **wrong)
    assert [each.path.name for each in raised.traceback][2:] == ["errors.py"]  # none of ours below
    assert {each.where for each in raised.value.problems} == {"fp16", *wrong}
    assert wrong_places(partial(PlannedTrainer, model=small_model(torch.float32), **wrong)) == wrong.keys()
    with pytest.raises(ConfigError, match=r"recompute: .* Set gradient_checkpointing=True"):
        planned(arguments(tmp_path), recompute="layer")


def test_a_loss_that_may_lack_the_balance_loss_of_routers_is_refused_when_the_trainer_is_made(tmp_path):
    class Own(PlannedTrainerMixin, Trainer):
        def compute_loss(self, *args, **how):
            return super().compute_loss(*args, **how)

    model = family_model("mixtral", changes={"output_router_logits": True})
    smoothed = partial(planned, arguments(tmp_path, label_smoothing_factor=0.1), model=model)
    summed = partial(planned, arguments(tmp_path), model=model, compute_loss_func=lambda outputs, *_, **__: 1.0)
    own = partial(Own, model=model, args=arguments(tmp_path), train_dataset=data(), data_collator=padded)
    for make, key in ((smoothed, "label_smoothing_factor"), (summed, "compute_loss"), (own, "compute_loss")):
        with pytest.raises(ConfigError, match=rf"{key}: expected .* balance loss of the routers"):
            make()


def test_rows_that_the_ranks_do_not_hold_are_named_before_the_first_step(tmp_path):
    """In train and eval data, in one message; a row that packs shorter ones is none of them."""
    kept = Kept()
    rows = data([10, 40, 20, 33])
    packed = [{name: list(range(1, 31)) * 2 for name in ("input_ids", "labels")}]
    trainer = planned(
        arguments(tmp_path, eval_strategy="steps"),
        capacity_tokens=32,
        train_dataset=Dataset.from_list(rows),
        eval_dataset={"short": Dataset.from_list(data([5])), "long": Dataset.from_list(data([5, 65]))},
        callbacks=[kept],
    )
    with pytest.raises(Problems) as raised:
        trainer.train()
    told = {each.where: each.got for each in raised.value.problems}
    assert told == {
        "train_dataset": "2 longer: row 1 (40 tokens), row 3 (33 tokens)",
        "eval_dataset.long": "1 longer: row 1 (65 tokens)",
    }
    assert kept.events == []
    with pytest.raises(DataError, match=r"eval_dataset: expected at most 32 tokens.*row 1 \(65 tokens\)"):
        planned(arguments(tmp_path), capacity_tokens=32).evaluate(Dataset.from_list(data([5, 65])))
    flattened = {"train_dataset": Dataset.from_list(packed), "data_collator": in_documents}
    planned(arguments(tmp_path, max_steps=1), capacity_tokens=32, **flattened).train()


def in_documents(examples):
    (row,) = examples
    half = len(row["input_ids"]) // 2
    return {**{name: [row[name]] for name in ("input_ids", "labels")}, "position_ids": [[*range(half), *range(half)]]}


def test_rows_without_a_label_are_named_before_the_first_step(tmp_path):
    none = [{**row, "labels": [7] + [-100] * (len(row["labels"]) - 1)} for row in data([4, 9])]  # nothing is before it
    args = arguments(tmp_path, max_steps=1)
    with pytest.warns(UserWarning, match="train_dataset: 2 rows without a label.*: 3, 4$"):
        planned(args, train_dataset=[*data([3, 8, 5]), *none]).train()
    with pytest.raises(DataError, match="train_dataset: expected a token with a label; got none in 2 rows"):
        planned(args, train_dataset=none).train()

    def labelled(examples):
        return padded([{**row, "labels": row["input_ids"]} for row in examples])

    planned(args, train_dataset=none, data_collator=labelled).train()


@pytest.mark.filterwarnings("ignore:train_dataset. 4 rows without a label")
def test_a_batch_without_a_label_is_a_step_of_zero_gradients_as_in_a_plain_trainer(tmp_path):
    """The optimizer decays and moves by its moments there, and what is logged leaves the batch out."""
    rows = data([9, 17, 5, 12] * 3)
    rows[4:8] = [{**row, "labels": [-100] * len(row["labels"])} for row in rows[4:8]]
    changes = {"train_sampling_strategy": "sequential", "max_steps": 3}
    expected = trained(Trainer, arguments(tmp_path, **changes), train_dataset=rows)
    with pytest.warns(UserWarning, match="step 2: no token of the batch has a label"):
        found = trained(PlannedTrainer, arguments(tmp_path, **changes), train_dataset=rows, capacity_tokens=CAPACITY)
    assert difference(found["weights"], expected["weights"]) < 2e-5
    for here, there in zip(found["logs"], expected["logs"], strict=True):
        for name in there.keys() & {"loss", "grad_norm"}:
            assert abs(here[name] - there[name]) < 1e-4, (name, here["step"])


def test_going_on_without_the_optimizers_state_is_refused(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    planned(arguments(tmp_path / "out", save_only_model=True, **saving)).train()
    with pytest.raises(ConfigError, match=r"no optimizer\.pt and no scheduler\.pt"):
        planned(arguments(tmp_path / "out", **saving)).train(resume_from_checkpoint=True)


def test_columns_that_are_not_of_tokens_are_refused_and_padding_on_any_side_goes():
    for batch, words in (
        ({"labels": [[1, 2]]}, "a column input_ids"),
        ({"input_ids": [[1, 2]], "score": [0.5]}, "one value per token in score"),
        ({"input_ids": [[1, 2]], "text": ["ab"]}, "numbers in text"),
        ({"input_ids": [[1, 2, 3]], "position_ids": [[5, 6, 7]]}, "0, 1, 2, ... of each document"),
    ):
        assert words in said(partial(list, rows_of(batch)))
    batch = {"input_ids": [[0, 0, 5, 6], [7, 8, 9, 0]], "attention_mask": [[0, 0, 1, 1], [1, 1, 1, 0]]}
    assert [row["input_ids"].tolist() for row in rows_of(batch)] == [[5, 6], [7, 8, 9]]


def test_a_trainer_trains_twice_evaluates_between_and_leaves_its_arguments(tmp_path):
    args = arguments(tmp_path, max_steps=2, activation_checkpointing=True)
    before = copy.deepcopy(args.to_dict())
    trainer = planned(args, eval_dataset=data())
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert args.to_dict() == before
    second = trainer.evaluate()["eval_loss"]
    session = trainer.session
    trainer.train()
    assert trainer.session is session  # states of the optimizer stay, as in Trainer
    assert trainer.evaluate()["eval_loss"] < second < first
