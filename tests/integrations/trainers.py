"""A Trainer as its users have it, plain in one process and planned on ranks, over the same data."""

import os

import pytest
import torch
from datasets import fingerprint
from testing.saved import whole_state
from testing.small import VOCAB, small_model
from transformers import TrainerCallback, TrainingArguments

from lengthwise.core.errors import Problems
from session.loops import in_ranks

CAPACITY = 96
LENGTHS = [3, 1, 150, 17, 64, 65, 2, 33, 128, 9, 40, 5, 90, 71, 8, 23, 12, 110, 7, 4, 59, 31, 2, 19]


def data(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(5)
    rows = []
    for length in lengths:
        ids = torch.randint(1, VOCAB, (length,), generator=generator)
        labels = torch.where(torch.rand(length, generator=generator) < 0.3, -100, ids)
        labels[-1] = ids[-1]
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def padded(examples):
    width = max(len(each["input_ids"]) for each in examples)
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [{**each, "attention_mask": [1] * len(each["input_ids"])} for each in examples]
    return {
        name: torch.tensor([row[name] + [fill] * (width - len(row[name])) for row in rows])
        for name, fill in fills.items()
    }


def arguments(folder, ranks=1, kind=TrainingArguments, **changes):
    """Return arguments whose global batch is the same for any number of ranks that divides 4."""
    settings = {
        "per_device_train_batch_size": 4 // ranks, "per_device_eval_batch_size": 4 // ranks, "max_steps": 4,
        "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "include_num_input_tokens_seen": "non_padding", **changes,
    }  # fmt: skip
    return kind(str(folder), **settings)


class Kept(TrainerCallback):
    """Keeps what is logged, and tells what the callbacks were."""

    def __init__(self):
        self.logs, self.events = [], []

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append({**logs, "step": state.global_step})

    def on_step_end(self, args, state, control, **_):
        self.events.append(("step", state.global_step, state.epoch))

    def on_substep_end(self, args, state, control, **_):
        self.events.append(("substep", state.global_step))

    def on_epoch_end(self, args, state, control, **_):
        self.events.append(("epoch", state.epoch))


def trained(kind, args, *, model=None, resume=None, callbacks=(), **options):
    """Train; return what was logged, what callbacks heard, and the weights."""
    kept = Kept()
    options = {"train_dataset": data(), "data_collator": padded, **options}
    trainer = kind(model=model or small_model(torch.float32), args=args, callbacks=[kept, *callbacks], **options)
    trainer.train(resume_from_checkpoint=resume)
    return {"logs": kept.logs, "events": kept.events, "weights": weights_of(trainer), "trainer": trainer}


def weights_of(trainer):
    """Return all weights; where they lie over the ranks, those that trained, on rank 0."""
    session = getattr(trainer, "session", None)
    if session is None or not session.engine.is_cut:
        every = trainer.model.named_parameters()
        return {name: each.detach().clone() for name, each in every if each.is_floating_point()}  # a base may be bytes
    return whole_state(session).get("master_weights", {})


def wrong_places(call):
    """Return where the problems of a refusal are."""
    with pytest.raises(Problems) as raised:
        call()
    return {each.where for each in raised.value.problems}


def in_trainers(work, ranks, folder):
    """Call `work(rank)` in processes as torchrun starts them; return what each returned."""

    def rank_work(rank):
        fingerprint._TEMP_DIR_FOR_TEMP_CACHE_FILES = None  # a fork would read what another has cached
        if ranks > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # the group is there: nobody asks
        return work(rank)

    return in_ranks(rank_work, ranks, folder)


def difference(found, expected):
    """Return the worst relative L2 difference of two sets of weights; of zeros, which have to stay, the distance."""
    assert found.keys() == expected.keys()
    return max((found[n] - expected[n]).norm().item() / (expected[n].norm().item() or 1.0) for n in expected)
