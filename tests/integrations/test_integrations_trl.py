"""TRL's trainers, planned on two ranks, give what they give in one process: losses, weights and every logged number."""

from functools import partial

import pytest
import torch

trl = pytest.importorskip("trl")  # an extra

import datasets  # noqa: E402
import grpo_runs  # noqa: E402
from peft import LoraConfig  # noqa: E402
from preferences import (  # noqa: E402
    chats,
    completions,
    family_model,
    model,
    pairs,
    pictures,
    quantized_model,
    seeing,
    tokenizer,
)
from trainers import in_trainers, trained, wrong_places  # noqa: E402
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer  # noqa: E402

from lengthwise.core.errors import LengthwiseError  # noqa: E402
from lengthwise.integrations.batches import refuse_dropped  # noqa: E402
from lengthwise.integrations.trl import DPOTrainer as PlannedDPOTrainer  # noqa: E402
from lengthwise.integrations.trl import PreferenceCollator  # noqa: E402
from lengthwise.integrations.trl import SFTTrainer as PlannedSFTTrainer  # noqa: E402
from lengthwise.models import keep_double  # noqa: E402
from tiers import some  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated")  # TRL and peft read it

CAPACITY = 200
SETTINGS = {
    "max_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "max_length": None,
    "activation_checkpointing": False,
}


def arguments(kind, folder, ranks, **changes):
    sizes = {"per_device_train_batch_size": 4 // ranks, "per_device_eval_batch_size": 4 // ranks}
    return kind(str(folder), **{**SETTINGS, **sizes, **changes})


def both(plain, planned, config, folder, *, make, capacity=CAPACITY, shard="auto", stages=1, **changes):
    """Return what the plain trainer logs and learns in one process, and each of two ranks of the planned one."""

    def work(ranks, kind, _rank):
        options = {"processing_class": tokenizer(), **make()}
        args = arguments(config, folder / f"ranks{ranks}", ranks, **changes)
        given = options.pop("model", None) or model()
        with keep_double(given.dtype):
            found = trained(kind, args, model=given, data_collator=None, **options)
        return found["logs"], found["weights"]

    (one,) = in_trainers(partial(work, 1, plain), 1, folder)
    kind = partial(planned, capacity_tokens=capacity, shard=shard, stages=stages)
    return one, in_trainers(partial(work, 2, kind), 2, folder)


def compared(one, found, *, tolerance=5e-5, weights=2e-4, others=(), rings=True):
    """Compare the weights and every logged number but times, operations, and `others`, of which means are others."""
    for each in found:
        of_both = ({"logs": logs, "weights": learned} for logs, learned in (each, one))
        grpo_runs.compared(*of_both, tolerance=tolerance, weights=weights, but=others)
        assert any(log.get("ring_token_ratio") for log in each[0]) == rings


LORA = partial(LoraConfig, r=4, target_modules="all-linear", task_type="CAUSAL_LM")
BALANCED = {"router_aux_loss_coef": 0.5}
IN_BF16 = {"tolerance": 5e-3, "weights": 1e-2}  # TRL casts adapters on a base in 4 bits; plain updates round them
IN_FP64 = {"tolerance": 1e-6, "weights": 1e-6}  # TRL's fused head has the sums of its gradients in fp32
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
CHATS = {"train_dataset": chats, "eval_dataset": partial(chats, 8)}
PICTURES = {"train_dataset": pictures, "eval_dataset": partial(pictures, 6)}
NOISE = {"adam_epsilon": 1e-4}  # a bias of keys in its tower has gradients of rounding alone
SEEN = {"mistral3": {"capacity": 60}, "internvl": {"capacity": 80}, "gemma4": {"capacity": 150}}
SFT = {
    "completions, accumulated": ({"train_dataset": completions}, {"gradient_accumulation_steps": 2}),
    "packed": ({"train_dataset": chats}, {"packing": True, "max_length": 160}),
    "over the ranks": (CHATS, {"assistant_only_loss": True, **EVALUATED}),
    "images": (PICTURES, {"capacity": 60, **EVALUATED}),
    "images of gemma3": (PICTURES, {"capacity": 200, **NOISE, **EVALUATED}),
    **{f"images of {family}": (PICTURES, {**SEEN[family], **NOISE, **EVALUATED}) for family in SEEN},
    "adapters, a base in 4 bits": ({**CHATS, "peft_config": LORA}, EVALUATED),
    "experts": ({**CHATS, "model": partial(family_model, "qwen3_moe")}, {**BALANCED, **EVALUATED}),
    "dft, recomputed": (CHATS, {"loss_type": "dft", "activation_checkpointing": True, "assistant_only_loss": True}),
}


@pytest.mark.parametrize("case", some(SFT, list(SFT).index("images")))
def test_sft_is_trls(case, tmp_path):
    data, changes = SFT[case]
    model().save_pretrained(tmp_path / "base")

    def make():
        base = {"model": quantized_model(tmp_path / "base")} if "4 bits" in case else {}
        base |= seeing(case, torch.float64, crops=True) if "images" in case else {}
        return {**base, **{name: each() for name, each in data.items()}}

    how = {"capacity": 100, "shard": "zero3" if "over the ranks" in case else "auto", **changes}
    one, found = both(SFTTrainer, PlannedSFTTrainer, SFTConfig, tmp_path, make=make, **how)
    # Ours are means over the tokens of an update or a data set; TRL's are means of the means of its batches.
    by_batch = ["eval_loss"] * ("eval_strategy" in changes)
    if "gradient_accumulation_steps" in changes:
        by_batch += ["entropy", "mean_token_accuracy"]
    bars = IN_BF16 if "4 bits" in case else IN_FP64 if "images" in case else {}
    compared(one, found, others=by_batch, **bars)


STAGES = {"stages": 2, "capacity": "auto"}
DPO = {
    "ipo and sft": {"loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.5], "gradient_accumulation_steps": 2},
    "adapters": {},
    "over the ranks": {},
    "adapters in stages": {**STAGES, "max_steps": 1},
    "adapters, a base in 4 bits": NOISE,
    "layers with states": {"family": "lfm2", "activation_checkpointing": True},
    "images": {"capacity": 60},
    "images of gemma3": {"capacity": 80, **NOISE},
    **{f"images of {family}": {**SEEN[family], **NOISE} for family in SEEN},
    "a reference that follows": {"sync_ref_model": True, "ref_model_sync_steps": 2, "activation_checkpointing": True},
    "weighted, evaluated": {"use_weighting": True, "ld_alpha": 0.5, **EVALUATED},
    "precomputed": {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 2, "ld_alpha": 0.5, **EVALUATED},
    "precomputed by the model": {"precompute_ref_log_probs": True},
    "experts in stages": {"family": "qwen3_moe", **STAGES, **BALANCED, **EVALUATED},
}


@pytest.mark.parametrize("case", some(DPO, list(DPO).index("adapters")))
def test_dpo_is_trls(case, tmp_path):
    model().save_pretrained(tmp_path / "base")

    def make():
        data = {"train_dataset": pairs(8), "eval_dataset": pairs(6)}
        if "adapters" in case:
            base = {"model": quantized_model(tmp_path / "base")} if "4 bits" in case else {}
            return {**data, **base, "peft_config": LORA()}
        if family:
            return {**data, "model": family_model(family), "ref_model": family_model(family)}
        if "images" in case:
            data = {"train_dataset": pictures(preferred=True), "eval_dataset": pictures(6, preferred=True)}
            return {**data, **seeing(case, torch.float64), "ref_model": seeing(case, torch.float64)["model"]}
        if case == "precomputed by the model":
            return data
        return {**data, "ref_model": model()}

    how = {"shard": "zero3" if "over the ranks" in case else "auto", **DPO[case]}
    family = how.pop("family", None)
    one, found = both(DPOTrainer, PlannedDPOTrainer, DPOConfig, tmp_path, make=make, **how)
    if "precomputed" in case:  # the first rewards are 0, or the rounding of a reference in other batches
        for logs, _ in (one, *found):
            logs[0] = {name: each for name, each in logs[0].items() if "rewards/" not in name}
    # A reference in other batches rounds otherwise, and Adam enlarges that where gradients are near 0
    bars = IN_BF16 if "4 bits" in case else {"weights": 4e-4} if "precomputed" in case else {}
    bars |= {"weights": 1e-5} if "images" in case else {}  # in fp64; rewards are differences in fp32
    compared(one, found, **{"tolerance": 2e-4, "rings": "stages" not in case, **bars})


@pytest.mark.exhaustive
def test_ranks_that_see_other_caches_compute_the_reference_together(tmp_path):
    """As on nodes with disks of their own, of which one lost its files."""

    def work(rank):
        pairs(4).save_to_disk(folder := tmp_path / f"node{rank}")
        found = []
        for _ in range(2):
            args = arguments(DPOConfig, tmp_path, 2, precompute_ref_log_probs=True)
            given = {"train_dataset": datasets.load_from_disk(folder), "processing_class": tokenizer()}
            trainer = PlannedDPOTrainer(model=model(), args=args, capacity_tokens=CAPACITY, **given)
            found.append(list(trainer.train_dataset["ref_chosen_logps"]))
            for each in folder.glob("cache-*") if rank else ():
                each.unlink()
        return found

    (one, other) = in_trainers(work, 2, tmp_path)
    assert one == other == [one[0]] * 2


def test_what_trl_would_do_beside_a_plan_is_refused(tmp_path):
    args = arguments(SFTConfig, tmp_path, 1, activation_offloading=True)
    args.torch_compile = True
    given = {"args": args, "train_dataset": object(), "shard": "zero4", "planner": "foo"}  # nobody reads the rows
    wrong = wrong_places(partial(PlannedSFTTrainer, model=model(), **given))
    assert wrong == {"activation_offloading", "torch_compile", "shard", "planner"}


@pytest.mark.parametrize(
    ("rows", "trainer", "config"), [(chats, PlannedSFTTrainer, SFTConfig), (pairs, PlannedDPOTrainer, DPOConfig)]
)
def test_a_column_of_the_prompt_that_trl_drops_is_refused_by_row(tmp_path, rows, trainer, config):
    given = {"args": arguments(config, tmp_path, 1), "processing_class": tokenizer(), "peft_config": LORA()}
    make = partial(trainer, capacity_tokens=999, **given)
    nothing, dropped = (rows(4).add_column("system", ["", None, each, ""]) for each in ("", "Be brief."))
    make(model=model(), train_dataset=nothing)
    assert len(list(refuse_dropped(nothing.to_iterable_dataset()))) == 4
    for refused in (
        lambda: make(model=model(), train_dataset=dropped),
        lambda: list(refuse_dropped(dropped.to_iterable_dataset())),
    ):
        with pytest.raises(LengthwiseError, match=r'row 2: expected .*; got "system"'):
            refused()


def test_a_preference_loss_of_a_model_with_dropout_is_refused(tmp_path):
    args = arguments(DPOConfig, tmp_path, 1, disable_dropout=False)
    given = {"train_dataset": pairs(), "processing_class": tokenizer(), "capacity_tokens": 999}
    trainer = PlannedDPOTrainer(model=model(), args=args, peft_config=LORA(lora_dropout=0.1), **given)
    with pytest.raises(LengthwiseError, match="the model runs twice"):
        trainer.train()


def test_pairs_with_columns_that_are_not_of_text_are_refused():
    inputs = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "input_features": torch.ones(2, 4)}
    with pytest.raises(LengthwiseError, match="input_features"):
        PreferenceCollator(lambda _: inputs)([{}])
