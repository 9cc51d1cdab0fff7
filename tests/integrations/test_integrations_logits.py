"""How many logits a step of a Trainer makes at once."""

from functools import partial

import pytest
import torch
from testing.small import small_model
from trainers import arguments, data, padded, trained

from session.loops import LargestTensor

pytest.importorskip("trl")  # an extra

from datasets import Dataset
from peft import LoraConfig
from preferences import chats, pairs, tokenizer
from preferences import model as trl_model
from test_integrations_trl import SETTINGS
from trl import DPOConfig, SFTConfig

from lengthwise.cost import plain_cost
from lengthwise.integrations.trainer_loss import is_next_tokens, is_of_labels
from lengthwise.integrations.transformers import Trainer
from lengthwise.integrations.trl import DPOTrainer, SFTTrainer
from lengthwise.session import engine
from tiers import some

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated")  # TRL reads it

WORDS = 1 << 16  # TRL makes logits of 32K words at a time
MODEL = partial(
    small_model, torch.float32, vocab_size=WORDS, hidden_size=8, num_attention_heads=2, pad_token_id=0, eos_token_id=1
)
PLAIN = {"train_dataset": data, "data_collator": lambda: padded}
TRL = {"processing_class": tokenizer, "data_collator": lambda: None}
LORA = partial(LoraConfig, r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
ONE_STEP = {**SETTINGS, "max_steps": 1, "per_device_train_batch_size": 1}
# name: (trainer, makes its arguments, makes what else it is given, whether it makes all logits)
CASES = {
    "trainer": (Trainer, partial(arguments, max_steps=1), PLAIN, False),
    "sft": (SFTTrainer, lambda folder: SFTConfig(str(folder), **ONE_STEP), {**TRL, "train_dataset": chats}, False),
    "dpo": (
        DPOTrainer,
        lambda folder: DPOConfig(str(folder), **ONE_STEP),
        {**TRL, "train_dataset": pairs, "peft_config": LORA},
        False,
    ),
    "smoothed labels": (Trainer, partial(arguments, max_steps=1, label_smoothing_factor=0.1), PLAIN, True),
}


@pytest.mark.parametrize("case", some(CASES))
def test_a_step_of_a_trainer_makes_all_logits_where_its_loss_needs_them(case, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "logits_at_once", lambda words, **_: 8 * words)
    kind, make, given, whole = CASES[case]
    kind, given = partial(kind, capacity_tokens=4096), {name: each() for name, each in given.items()}
    with LargestTensor() as largest:
        trainer = trained(kind, make(tmp_path), model=MODEL(), **given)["trainer"]
    assert (largest.numbers > 0.75 * trainer._last.num_tokens * WORDS) == whole
    assert trainer.session.planning.expects.whole_logits == whole
    trainer.session.close()


CHANGES = {
    "none": lambda _: None,
    "forward": lambda trainer: setattr(trainer.model, "forward", lambda **_: None),
    "hook": lambda trainer: trainer.model.register_forward_hook(lambda *_: None),
    "loss_function": lambda trainer: setattr(trainer.model, "loss_function", lambda **_: None),
    "compute_loss": lambda trainer: setattr(trainer, "compute_loss", lambda *_, **__: 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_with_a_forward_or_loss_of_its_own_keeps_it(change):
    trainer = object.__new__(Trainer)
    trainer.model, trainer.compute_loss_func, trainer.label_smoother = small_model(), None, None
    CHANGES[change](trainer)
    assert is_next_tokens(trainer) == (change == "none")
    assert is_of_labels(trainer.model) == (change in ("none", "compute_loss"))


def own_loss(outputs, labels, num_items_in_batch):
    return (outputs.logits[:, :-1].sum() - labels.sum()) / num_items_in_batch


@pytest.mark.parametrize("case", ["trainer", "own loss", "dpo"])
def test_rows_share_prompts_unless_a_forward_or_loss_of_the_user_may_count_them(case, tmp_path):
    rows = [{"input_ids": [7] * 40 + [end], "labels": [-100] * 40 + [end]} for end in range(1, 5)]
    options = {"capacity_tokens": 512, "measurements": plain_cost(linear_seconds=1.0), "heads": "off"}
    model, kind = small_model(torch.float32), Trainer
    args = arguments(tmp_path, max_steps=1, remove_unused_columns=False)
    if case == "own loss":
        options["compute_loss_func"] = own_loss
    elif case == "dpo":
        kind, model = DPOTrainer, trl_model()
        rows = Dataset.from_list([{"prompt": "p" * 40, "chosen": "a", "rejected": each} for each in "bc"])
        args = DPOConfig(str(tmp_path), **{**ONE_STEP, "per_device_train_batch_size": 2})
        options |= {"processing_class": tokenizer(), "data_collator": None, "peft_config": LORA()}
    trainer = trained(kind, args, model=model, train_dataset=rows, **options)["trainer"]
    assert bool(trainer._last.plan.parents) == ("own" not in case)
    trainer.session.close()
