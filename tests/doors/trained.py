"""Layouts and doors as data: how a training lies over ranks, where a user starts it, which losses it takes there.

A door is a function of a layout, a loss, the models' folder and one to work in. It returns what each rank saw of the
training, and which of `plain.ROWS` each step took.
"""

from dataclasses import dataclass, replace
from functools import partial

import datasets
from transformers import TrainerCallback, TrainingArguments
from trl import SFTConfig

import lengthwise
from doors import plain
from doors.plain import EVAL_ROWS, ROWS, STEPS, Outcome
from integrations.preferences import tokenizer
from integrations.trainers import arguments, in_trainers, padded
from lengthwise import Session
from lengthwise.integrations.transformers import Trainer
from lengthwise.integrations.trl import SFTTrainer
from run.small_runs import read_lines, write_rows, write_run
from session.loops import in_ranks


@dataclass(frozen=True)
class Layout:
    """A number of ranks, settings in a session's words, and one of `plain.MODELS`."""

    ranks: int
    settings: dict
    model: str = "whole"


DISK = {"offload": {"store": "disk", "ratio": 1.0}, "capacity_tokens": 40}  # in which 97 do not fit otherwise
LAYOUTS = {
    "zero1": Layout(2, {"shard": "zero1"}),
    "zero3": Layout(3, {"shard": "zero3"}, "tied"),
    "hybrid": Layout(4, {"shard": "hybrid", "ranks_per_node": 2, "overlap": True}, "tied"),
    "stages": Layout(2, {"stages": 2, "capacity_tokens": 140}),
    "virtual stages": Layout(4, {"stages": 2, "virtual": 2, "capacity_tokens": 80}, "tied"),
    "optimizer on the host": Layout(2, {"offload_optimizer": True}),
    "adapters": Layout(2, {}, "adapters"),
    "layers computed again": Layout(2, {"recompute": "layer"}),
    "split heads": Layout(2, {"heads": 2}),
}
MORE = {
    "one rank": Layout(1, {"capacity_tokens": 140}),
    "three ranks": Layout(3, {"shard": "zero1"}),
    "activations on the disk": Layout(2, DISK),
    "zero3, untied": Layout(2, {"shard": "zero3"}),
    "zero3, optimizer on the host": Layout(3, {"shard": "zero3", "offload_optimizer": True}, "tied"),
    "zero3, adapters": Layout(3, {"shard": "zero3"}, "adapters"),
    "zero3, activations on the disk": Layout(2, {"shard": "zero3", **DISK}, "tied"),
    "three stages of one rank": Layout(3, {"stages": 3, "capacity_tokens": 140}, "tied"),
    "stages, adapters": Layout(4, {"stages": 2, "capacity_tokens": 80}, "adapters"),
    "stages, activations on the disk": Layout(4, {"stages": 2, **DISK}),
    "all but attention computed again": Layout(2, {"recompute": "all_but_attention"}),
    "norms, RoPE and activations computed again": Layout(2, {"recompute": "elementwise"}),
}


def settings_of(layout, folder):
    settings = {"capacity_tokens": 64, **layout.settings}
    if "offload" in settings:
        settings["offload"] = {**settings["offload"], "path": str(folder)}
    return settings


# `lengthwise train`.


ADAMW = {"lr": plain.LR, "betas": plain.BETAS, "eps": plain.EPS, "weight_decay": plain.DECAY}
ADAMW |= {"max_grad_norm": plain.LIMIT, "schedule": "constant", "warmup_steps": 0}


def by_train(layout, _loss, models, folder):
    settings = settings_of(layout, folder)
    offloads = settings.pop("offload_optimizer", False)
    run = write_run(
        folder,
        ROWS,
        model=models / layout.model,
        lora={"adapter": str(models / "adapter")} if layout.model == "adapters" else None,
        eval={"data": [{"path": str(write_rows(folder / "eval.jsonl", EVAL_ROWS))}], "every_steps": 1},
        steps=len(STEPS),
        global_batch={"sequences": len(STEPS[0])},
        optimizer={**ADAMW, "offload": offloads},
        **settings,
    )
    lengthwise.train(run, ranks=layout.ranks)
    trained, evaluated, ledger = (read_lines(folder / f"out/{name}.jsonl") for name in ("metrics", "eval", "ledger"))
    sizes = {(row["num_sequences"], row["num_tokens"], row["num_loss_tokens"]) for row in evaluated}
    assert sizes == {(len(EVAL_ROWS), sum(plain.EVAL_LENGTHS), plain.count_labels(EVAL_ROWS))}
    assert sum(row["num_loss_tokens"] for row in trained) == plain.count_labels(ROWS)
    steps = [
        (row["loss"], row["grad_norm"], after["loss"], row["ring_token_ratio"])
        for row, after in zip(trained, evaluated, strict=True)
    ]
    return [Outcome(steps, plain.load_saved(folder / "out/model"))], tuple(tuple(row["sequences"]) for row in ledger)


# A loop of the user's. Losses in the forms that `Session` has for them.


def of_tokens(output, tokens):
    return plain.weighed(output.logits[0], tokens.shift_labels, tokens.columns["importance"])


def of_microbatch(model, inputs, divisor):
    labels = inputs.pop("labels")
    return plain.share_with_z(model(**inputs).logits, labels, divisor)


def keywords(rows, loss):
    """Return what `backward` and `evaluate` are given beside rows."""
    compute_loss = partial(of_microbatch, divisor=float(plain.count_labels(rows)))
    return {"token loss": {"loss": of_tokens}, "compute_loss": {"compute_loss": compute_loss}}.get(loss, {})


def run_step(session, step, rows, loss):
    if loss in plain.COMBINED:
        per, combine = plain.COMBINED[loss]
        return session.backward_by_sequence(step, combine=combine, per=per)
    return session.backward(step, **keywords(rows, loss))


def evaluate(session, rows, loss):
    if loss in plain.COMBINED:
        return plain.combined(session.token_values(rows), loss).item()
    return session.evaluate(rows, **keywords(rows, loss)).loss


def by_session(layout, loss, models, folder):
    """Steps are planned ahead by `batches`; where rows have a column of the user's, each is given as a list."""

    def columns(rows):
        return [{**row, "importance": plain.importance_of(row)} if loss == "token loss" else row for row in rows]

    def work(_rank):
        model, found = plain.load_model(models, layout.model), Outcome()
        optimizer = plain.make_optimizer(model)
        batches = [columns(ROWS[number] for number in step) for step in STEPS]
        with Session(model, optimizer, **settings_of(layout, folder)) as session:
            steps = batches if loss == "token loss" else session.batches(batches)
            for rows, step in zip(batches, steps, strict=True):
                result = run_step(session, step, rows, loss)
                session.clip_grad_norm_(plain.LIMIT)
                optimizer.step()
                optimizer.zero_grad()
                evaluated = evaluate(session, columns(EVAL_ROWS), loss)
                found.steps.append((result.loss, result.grad_norm, evaluated, result.ring_token_ratio))
            session.save_pretrained(folder / "saved")
        return found

    found = in_ranks(work, layout.ranks, folder)
    return [replace(each, weights=plain.load_saved(folder / "saved")) for each in found], STEPS


# Trainers of other libraries.


ARGUMENTS = {"optim": "adamw_torch", "learning_rate": plain.LR, "weight_decay": plain.DECAY, "adam_epsilon": plain.EPS}
ARGUMENTS |= {"adam_beta1": plain.BETAS[0], "adam_beta2": plain.BETAS[1], "max_grad_norm": plain.LIMIT}
ARGUMENTS |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_steps": len(STEPS), "bf16": False}
ARGUMENTS |= {"train_sampling_strategy": "sequential", "per_device_eval_batch_size": 1}
ARGUMENTS |= {"eval_strategy": "steps", "eval_steps": 1}


class Logged(TrainerCallback):
    def __init__(self, found):
        self.found, self.logs = found, {}

    def on_log(self, args, state, control, logs=None, **_):
        self.logs |= logs
        if "eval_loss" in logs:  # which is logged after its step
            names = ("loss", "grad_norm", "eval_loss", "ring_token_ratio")
            self.found.steps.append(tuple(self.logs[name] for name in names))


class OwnLoss:
    """Makes a Trainer one with a loss of the user's."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert not return_outputs
        return of_microbatch(model, inputs, num_items_in_batch)


def by_trainer(layout, loss, models, folder, *, base=Trainer, config=TrainingArguments, **given):
    settings = settings_of(layout, folder)
    recompute = settings.pop("recompute", "none")
    again = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"recompute": recompute}}
    kind = type("OwnTrainer", (OwnLoss, base), {}) if loss == "compute_loss" else base
    rows = {"train_dataset": datasets.Dataset.from_list(ROWS), "eval_dataset": datasets.Dataset.from_list(EVAL_ROWS)}

    def work(_rank):
        found, model = Outcome(), plain.load_model(models, layout.model)
        size = len(STEPS[0]) // layout.ranks
        given["args"] = arguments(
            folder,
            kind=config,
            per_device_train_batch_size=size,
            **(again if recompute != "none" else {"activation_checkpointing": False}),
            **ARGUMENTS,
        )
        given.update(rows, callbacks=[Logged(found)], data_collator=padded)
        trainer = kind(model=model, **given, **settings)
        trainer.train()
        trainer.save_model(str(folder / "saved"))
        return found

    found = in_trainers(work, layout.ranks, folder)
    return [replace(each, weights=plain.load_saved(folder / "saved")) for each in found], STEPS


def by_sft(*case):
    config = partial(SFTConfig, max_length=None, dataset_kwargs={"skip_prepare_dataset": True})
    return by_trainer(*case, base=SFTTrainer, config=config, processing_class=tokenizer())


@dataclass(frozen=True)
class Door:
    """Its function, the losses that it takes, and settings that it has not."""

    train: object
    losses: tuple[str, ...] = ("next token", "compute_loss")
    lacks: tuple[tuple[str, object], ...] = (("recompute", "all_but_attention"),)

    def takes(self, layout):
        return not any(each in self.lacks for each in layout.settings.items() if each[0] != "offload")


DOORS = {
    "train": Door(by_train, ("next token",), ()),
    "session": Door(by_session, tuple(plain.LOSSES), ()),
    "trainer": Door(by_trainer),
    "sft": Door(by_sft),
}
