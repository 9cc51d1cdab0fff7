"""Every family of README's table through every door, from a config of the form in which it is published.

The model is written in bf16, as checkpoints are; each door computes in fp32. The first loss is plain Hugging Face's.
"""

import json
from functools import cache
from pathlib import Path

import datasets
import pytest
import torch
from testing import TOWER_PAIRS, tiny_family_config, tiny_tower_config
from testing.tiny import VOCAB
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from trl import SFTConfig

from integrations.preferences import tokenizer
from integrations.trainers import arguments, padded, trained
from lengthwise import Session
from lengthwise.config import load_config
from lengthwise.core.errors import ConfigError
from lengthwise.core.trained import WITH_TOWERS
from lengthwise.integrations.transformers import Trainer
from lengthwise.integrations.trl import SFTTrainer
from run.small_runs import call, losses, make_rows, plain_loss, write_rows, write_run
from tiers import more

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated"),  # TRL reads it
    pytest.mark.filterwarnings("ignore:(train|eval)_dataset. .* without a label"),
]
README = Path(__file__).parents[2] / "README.md"
ROWS = [{"input_ids": [each % VOCAB for each in row["input_ids"]]} for row in make_rows([9, 3, 14, 6])]
LABELLED = [{**row, "labels": row["input_ids"]} for row in ROWS]
GEMMA = {"head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 8}
FORMS = {  # of releases, beside the family's own
    "gemma4": (GEMMA, {**GEMMA, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
                       "moe_intermediate_size": 24, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
}  # fmt: skip


def families():
    table = README.read_text().partition("## Models and what runs")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("|")]
    return [name.strip(" `") for row in rows if row[3].strip().startswith("yes") for name in row[2].split(",")]


FAMILIES = families()
CASES = [(name, form) for name in FAMILIES for form in range(len(FORMS.get(name, ({},))))]


def config_of(family, form):
    changes = FORMS.get(family, ({},))[form]
    pair = next((pair for pair in TOWER_PAIRS.values() if pair[0] == family), None)
    return tiny_family_config(family, changes) if pair is None else tiny_tower_config(pair[0], pair[1], changes)


def opened(folder):
    kind = (
        AutoModelForMultimodalLM
        if json.loads((folder / "config.json").read_text())["model_type"] in WITH_TOWERS
        else AutoModelForCausalLM
    )
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return kind.from_pretrained(folder, dtype=torch.float32, **how)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    @cache
    def write(family, form):
        folder, config = tmp_path_factory.mktemp(family), config_of(family, form)
        torch.manual_seed(5)
        kind = AutoModelForMultimodalLM if family in WITH_TOWERS else AutoModelForCausalLM
        kind.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
        return folder, plain_loss(opened(folder).eval(), ROWS, torch.float32)

    return write


def run_file(folder, model):
    return write_run(folder, ROWS, model=model, precision="fp32", steps=2, capacity_tokens=32)


def by_train(model, folder):
    path = run_file(folder, model)
    assert call("train", path) == 0
    assert len(losses(folder / "out")) == 2
    assert list((folder / "out/model").glob("*.safetensors"))
    return losses(folder / "out")


def by_verify(model, folder):
    assert call("verify", run_file(folder, model)) == 0


def by_plan(model, folder):
    assert call("plan", "--config", run_file(folder, model), "--ranks", 2, "--out", folder / "plan.json") == 0
    assert json.loads((folder / "plan.json").read_text())["microbatches"]


def by_simulate(model, folder):
    (folder / "lengths.json").write_text("[9, 3, 14, 6]")
    rest = ("--lengths", folder / "lengths.json", "--ranks", 2, "--batch-tokens", 32, "--batches", 1, "--capacity", 64)
    assert call("simulate", "--model", model / "config.json", *rest) == 0


def by_init(model, folder):
    data = write_rows(folder / "rows.jsonl", ROWS)
    made = folder / "my.yaml"
    assert call("init", "--model", model, "--gpus", 1, "--hardware", "cpu", "--data", data, "--out", made) == 0
    assert load_config(made, []).model == str(model)


def by_session(model, folder):
    own = opened(model).train()
    optimizer, found = torch.optim.AdamW(own.parameters(), lr=3e-4), []
    session = Session(own, optimizer, capacity_tokens=32)
    for _ in range(2):
        found.append(float(session.backward([row["input_ids"] for row in ROWS]).loss))
        optimizer.step()
        optimizer.zero_grad()
    return found


def by_trainer(model, folder, kind=Trainer, **options):
    args = arguments(folder, max_steps=2, warmup_steps=0, **options.pop("config", {}))
    found = trained(kind, args, model=opened(model).train(), train_dataset=LABELLED, capacity_tokens=32, **options)
    return [each["loss"] for each in found["logs"] if "loss" in each]


def by_sft(model, folder):
    config = {
        "kind": SFTConfig,
        "max_length": None,
        "router_aux_loss_coef": 0.0,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    rows = {"train_dataset": datasets.Dataset.from_list(LABELLED), "processing_class": tokenizer()}
    args = arguments(folder, max_steps=2, warmup_steps=0, **config)
    found = trained(SFTTrainer, args, model=opened(model).train(), capacity_tokens=32, data_collator=padded, **rows)
    return [each["loss"] for each in found["logs"] if "loss" in each]


DOORS = {"init": by_init, "simulate": by_simulate, "plan": by_plan, "verify": by_verify, "train": by_train}
DOORS |= {"session": by_session, "trainer": by_trainer, "sft": by_sft}
CELLS = [(*case, door) for case in CASES for door in DOORS]
BY_DEFAULT = {("gemma4", "train"), ("gemma4", "plan"), ("qwen3_moe", "trainer"), ("nemotron_h", "session")}
BY_DEFAULT |= {("internvl", "sft")}


@pytest.mark.parametrize(
    ("family", "form", "door"), [cell if (cell[0], cell[2]) in BY_DEFAULT else more(*cell) for cell in CELLS]
)
def test_a_family_passes_every_door(family, form, door, written, tmp_path):
    model, expected = written(family, form)
    if door in ("trainer", "sft") and not getattr(type(opened(model)), "accepts_loss_kwargs", True):
        with pytest.raises(ConfigError, match="takes no num_items_in_batch"):  # a mean over a microbatch
            DOORS[door](model, tmp_path)
        return
    found = DOORS[door](model, tmp_path)
    if found is not None:
        assert found[0] == pytest.approx(expected, rel=2e-4)
        assert len(found) == 2
        assert found[1] < found[0]
