"""Every family of README's table, in the form of its released checkpoint, through every door: the loss of plain
Hugging Face in the first step, and a saved model that opens and has learned."""

import json
import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from testing import enliven
from testing.small import plain_loss, relative
from testing.tiny import ROPES, tiny_family_config
from testing.towers import tiny_tower_config
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from trl import SFTConfig

from integrations import grpo_runs
from integrations.grpo_runs import Plain, Planned, compared
from integrations.preferences import chats, tokenizer
from integrations.trainers import Kept, arguments, in_trainers, padded
from lengthwise import Session
from lengthwise.integrations.transformers import Trainer
from lengthwise.integrations.trl import SFTTrainer
from run.small_runs import call, read_lines, train, write_run
from session.loops import in_ranks
from tiers import more

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated")  # peft and TRL read it
FP32, RANKS, CAPACITY, LR = torch.float32, 2, 256, 1e-3
UNBALANCED = {"router_aux_loss_coef": 0.0}  # TRL's, of mixtures of experts: the loss is that of the tokens alone
WORDS = {"vocab_size": len(tokenizer()), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
TIED = {"tie_word_embeddings": True}

# Layers of Gemma 4: heads of another size without a window, in the three released forms.
_GLOBAL = {"global_head_dim": 16, "final_logit_softcapping": 30.0}
_PER_LAYER = {**_GLOBAL, "vocab_size_per_layer_input": len(tokenizer()), "use_double_wide_mlp": True}
_KEYS_ARE_VALUES = {**_GLOBAL, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0}
_KEYS_ARE_VALUES |= {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}

# By a name: (model_type of the whole, or None; that of the text part; changes of the text part, as released).
_QWEN2 = {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}
_ALONE = ("qwen3", "ministral", "gpt_oss", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "gemma3_text", "olmo3", "phi3")
_ALONE += ("gemma2", "qwen3_next", "kimi_linear", "olmo_hybrid", "nemotron_h", "granitemoehybrid", "bamba", "falcon_h1")
_ALONE += ("lfm2", "lfm2_moe")
_OF_OWN_TEXT = ("qwen3_5", "qwen3_5_moe", "gemma3", "qwen3_vl", "qwen2_5_vl", "glm4v_moe")
FAMILIES = {
    **{name: (None, name, {}) for name in _ALONE},
    "qwen3, tied": (None, "qwen3", TIED),
    "qwen2": (None, "qwen2", _QWEN2),
    "llama": (None, "llama", {"rope_parameters": ROPES["llama3"]}),
    "mistral": (None, "mistral", {"sliding_window": None}),
    "mixtral": (None, "mixtral", {"sliding_window": None}),
    "qwen3_moe": (None, "qwen3_moe", {"mlp_only_layers": []}),
    **{name: (name, f"{name}_text", {}) for name in _OF_OWN_TEXT},
    "gemma4": ("gemma4", "gemma4_text", _PER_LAYER),
    "gemma4, keys are values": ("gemma4", "gemma4_text", _KEYS_ARE_VALUES),
    "gemma4, experts": ("gemma4", "gemma4_text", {**_KEYS_ARE_VALUES, "enable_moe_block": True}),
    "gemma4_text": (None, "gemma4_text", _PER_LAYER),
    "mistral3": ("mistral3", "mistral", {"sliding_window": None}),
    "mistral3, ministral3": ("mistral3", "ministral3", {}),
    "kimi_k25": ("kimi_k25", "deepseek_v3", {}),
    "internvl": ("internvl", "qwen2", _QWEN2),
    "internvl, experts": ("internvl", "qwen3_moe", {}),
}


@cache
def rows():
    """Return the tokens and labels of a few chats; only the assistant's turns have a loss."""
    found = []
    for chat in chats(6)["messages"]:
        made = tokenizer().apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = made["input_ids"], made["assistant_masks"]
        labels = [each if kept else -100 for each, kept in zip(ids, mask, strict=True)]
        found.append({"input_ids": ids, "labels": labels})
    return found


def opened(folder, **how):
    """Return a model as its user opens it; nothing is missing or left over."""
    is_whole = "text_config" in json.loads((Path(folder) / "config.json").read_text())
    kind = AutoModelForMultimodalLM if is_whole else AutoModelForCausalLM
    how = {"dtype": FP32, "output_loading_info": True, **how}
    model, loading = kind.from_pretrained(folder, **how)
    assert not any(loading.values())
    return model.train()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return a function that writes the checkpoint of a family once, in bf16 as published, with a tokenizer."""

    @cache
    def folder_of(name):
        whole, text, changes = FAMILIES[name]
        folder = tmp_path_factory.mktemp("model")
        changes = {**WORDS, **changes}
        config = tiny_tower_config(whole, text, changes) if whole else tiny_family_config(text, changes)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            kind = AutoModelForMultimodalLM if whole else AutoModelForCausalLM
            model = enliven(kind.from_config(config))
            for each_name, each in model.named_buffers():
                if each_name.endswith("layer_scalar"):  # Gemma 4's, 1 in a fresh model
                    each.fill_(0.7)
            model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
        return folder

    return folder_of


def run_file(folder, model, **keys):
    (folder / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats(6)))
    data = [{"path": "chats.jsonl"}]
    keys = {"precision": "fp32", "capacity_tokens": CAPACITY, "optimizer": {"lr": LR}, **keys}
    return write_run(folder, model=model, data=data, steps=1, global_batch={"sequences": 6}, **keys)


def by_train(model, folder):
    evaluation = {"data": [{"path": "chats.jsonl"}], "every_steps": 1}
    output = train(run_file(folder, model, eval=evaluation), "--ranks", RANKS)
    return *(read_lines(output / f"{name}.jsonl")[-1]["loss"] for name in ("metrics", "eval")), output / "model"


def by_session(model, folder):
    def work(_rank):
        own = opened(model)
        optimizer = torch.optim.AdamW(own.parameters(), lr=LR)
        with Session(own, optimizer, capacity_tokens=CAPACITY) as session:
            before = session.backward(rows()).loss
            optimizer.step()
            after = session.evaluate(rows()).loss
            session.save_pretrained(folder / "saved")
        return before, after

    return *in_ranks(work, RANKS, folder)[0], folder / "saved"


@pytest.mark.parametrize("name", [name if name == "gemma4" else more(name) for name in FAMILIES])
def test_a_session_takes_it_in_the_published_dtype(name, folder_of):
    """Also where transformers keeps some weights in fp32, routers and numbers of states."""
    own = opened(folder_of(name), dtype="auto")
    optimizer = torch.optim.SGD(own.parameters(), lr=0.0)
    with Session(own, optimizer, capacity_tokens=CAPACITY) as session:
        loss = session.backward(rows()).loss
    assert relative(loss, plain_loss(opened(folder_of(name), experts_implementation="eager"), rows(), FP32)) < 1e-2


def by_trainer(model, folder, kind=Trainer, made=opened, **given):
    given = {"train_dataset": rows(), "eval_dataset": rows(), "data_collator": padded, "args": {}, **given}
    changes = {"max_steps": 1, "learning_rate": LR, "lr_scheduler_type": "constant", "warmup_steps": 0, "bf16": False}
    changes |= {"per_device_train_batch_size": 6 // RANKS, **given.pop("args")}

    def work(_rank):
        kept = Kept()
        args = arguments(folder, RANKS, **changes)
        trainer = kind(model=made(model), args=args, callbacks=[kept], capacity_tokens=CAPACITY, **given)
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        trainer.save_model(str(folder / "saved"))
        return kept.logs[0]["loss"], after

    return *in_trainers(work, RANKS, folder)[0], folder / "saved"


def by_sft(model, folder):
    config = {"kind": SFTConfig, "max_length": None, "assistant_only_loss": True, **UNBALANCED}
    data = dict.fromkeys(("train_dataset", "eval_dataset"), chats(6))
    own = {"data_collator": None, "processing_class": tokenizer()}
    return by_trainer(model, folder, SFTTrainer, str, args=config, **data, **own)


DOORS = {"train": by_train, "session": by_session, "trainer": by_trainer, "sft": by_sft}
DEFAULT = {("gemma4", "train"), ("gemma4", "sft"), ("qwen3_moe", "session"), ("lfm2", "trainer")}
CELLS = [cell if cell in DEFAULT else more(*cell) for cell in product(FAMILIES, DOORS)]


@pytest.mark.parametrize(("name", "door"), CELLS)
def test_the_first_loss_is_that_of_plain_hugging_face_and_what_is_saved_has_learned(name, door, folder_of, tmp_path):
    folder = folder_of(name)
    before, after, saved = DOORS[door](folder, tmp_path)
    own, plain = opened(saved), opened(folder, experts_implementation="eager")
    bar = 5e-5 if door == "sft" else 5e-6
    assert relative(before, plain_loss(plain, rows(), FP32)) < bar
    assert relative(after, plain_loss(own, rows(), FP32)) < bar
    assert after < before
    found, given = own.state_dict(), plain.state_dict()
    assert found.keys() == given.keys()
    of_text = r"(model\.language_model|lm_head)\." if FAMILIES[name][0] else ""
    towers = [each for each in given if not re.match(of_text, each)]
    assert all(torch.equal(found[each], given[each]) for each in towers)
    assert bool(towers) == bool(FAMILIES[name][0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tools_take_it(name, folder_of, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    folder = folder_of(name)
    path = run_file(tmp_path, folder)
    (tmp_path / "lengths.json").write_text("[500, 700, 900]")
    sizes = ("--gpus", 2, "--lengths", "lengths.json", "--batch-tokens", "4K", "--batches", 1)
    for verb in (
        ("init", "--model", folder, "--data", "chats.jsonl", "--gpus", 2, "--hardware", "cpu", "--out", "own.yaml"),
        ("data", "own.yaml"),
        ("data", path),
        ("simulate", "--model", folder, *sizes),
        ("plan", "--config", path, "--ranks", 2, "--out", "plan.json"),
        ("verify", path, "--ranks", 2),
    ):
        assert call(*verb) == 0, (verb, capfd.readouterr())


NO_BALANCE = {"glm4v_moe", "granitemoehybrid", "internvl, experts"}  # plain TRL fails on their balance loss
GRPO = {"max_steps": 1, "max_completion_length": 8, "gradient_accumulation_steps": 1, "learning_rate": LR}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_grpo_is_that_of_plain_trl(name, folder_of, tmp_path):
    """Completions are those that transformers generates with the family's own cache."""

    def run(kind, **options):
        config = GRPO | (UNBALANCED if name in NO_BALANCE else {})
        return grpo_runs.trained(kind, tmp_path, 1, opened(folder_of(name)), config=config, generates=True, **options)

    compared(run(Planned, capacity_tokens=CAPACITY), run(Plain), tolerance=1e-4, weights=1e-4)


def test_every_model_of_the_table_is_here():
    table = (Path(__file__).parents[2] / "README.md").read_text().partition("## Models and what runs")[2]
    lines = [line.split("|") for line in table.splitlines() if line.startswith("| ") and "| yes" in line]
    named = {name for line in lines for name in re.findall(r"`(\w+)`", line[2])}
    assert len(named) > 30
    assert named <= {whole or text for whole, text, _ in FAMILIES.values()}
