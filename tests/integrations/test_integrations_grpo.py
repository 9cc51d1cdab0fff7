"""GRPO on ranks gives what plain TRL gives in one process: weights and every logged number."""

import sys
from functools import partial
from importlib import import_module
from runpy import run_module

import pytest
import torch

pytest.importorskip("trl")  # an extra

from grpo_runs import Colocated, Plain, PlainRLOO, Planned, PlannedRLOO, Sampled, compared, prompts, trained, with_tools
from preferences import family_model, lora, model, pictures, seeing
from trainers import difference, in_trainers, wrong_places
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from lengthwise.core.errors import ConfigError, DataError, LengthwiseError
from lengthwise.integrations.arguments import PLANNED
from lengthwise.integrations.rollouts import planned_rows
from lengthwise.integrations.transformers import PlannedTrainerMixin
from tiers import some

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated"),  # TRL and peft read it
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
]

OFF = {"num_iterations": 2, "max_steps": 3}
SERVER = {"use_vllm": True, "vllm_mode": "server"}
COLOCATED = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
TOKENS = {**SERVER, "vllm_importance_sampling_mode": "token_truncate"}
ONE_BATCH = {"gradient_accumulation_steps": 1, "rows": 24}  # TRL's balance loss is a mean of batches
BALANCED = {"router_aux_loss_coef": 0.5, **ONE_BATCH}
CASES = {
    "dapo, off-policy, KL, sampled elsewhere, over the ranks": {**TOKENS, **OFF, "beta": 0.1, "delta": 1.5},
    "bnpo, tools, evaluated": {"loss_type": "bnpo", "tools": True, **EVALUATED},  # others' losses of groups are 0
    "rloo, KL": {"rloo": True, "beta": 0.1},
    "sequences, off-policy, quantile, bonus, adapters": {
        **OFF,
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "top_entropy_quantile": 0.6,
        "use_adaptive_entropy": True,
        "entropy_coef": 0.1,
        "entropy_target": 9.0,
        "beta": 0.1,
    },
    "in this process, asleep, over the ranks": {**COLOCATED, "vllm_enable_sleep_mode": True, **OFF},
    "experts, evaluated": {"family": "mixtral", "loss_type": "grpo", **BALANCED, **EVALUATED},
    "images, KL, over the ranks": {"beta": 0.1, "images": True, **OFF},
    **{f"images of {each}, KL": {"beta": 0.1, "images": True, **OFF} for each in ("gemma3", "mistral3", "internvl")},
    "a reference that follows": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, **OFF},
    "dr_grpo, off-policy, clipped below 1": {"loss_type": "dr_grpo", "delta": 0.9, **OFF},
    "cispo, off-policy": {"loss_type": "cispo", "epsilon_high": 1.05, **OFF},
    "sapo, off-policy": {"loss_type": "sapo", **OFF},
    "vespo, off-policy": {"loss_type": "vespo", **OFF},
    "steps per generation": {"steps_per_generation": 4, "max_steps": 4, "rows": 24},
    "off-policy mask": {**TOKENS, "off_policy_mask_threshold": 0.05, "loss_type": "grpo"},
    "in this process, split over the ranks": COLOCATED,
}


def loaded(folder, **how):
    if folder.name != "seeing":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **how)
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)


def asked():
    """Return questions about images, without answers; TRL's GRPO takes none without an image beside them."""
    every = pictures(40, preferred=True).remove_columns(["chosen", "rejected"])
    return every.select([number for number, each in enumerate(every["images"]) if each])


CELLS = [(case, 2 if place < 5 else 3) for place, case in enumerate(CASES)]
ONCE = {"capacity_tokens": 128, "config": {"max_steps": 1}}


@pytest.mark.parametrize(("case", "ranks"), some(CELLS, 0, 2))
def test_grpo_is_trls(case, ranks, tmp_path, saved):
    config = dict(CASES[case])
    how = {"rollout_func": with_tools} if config.pop("tools", False) else {}
    how |= {"peft_config": lora()} if "adapters" in case else {}
    plain, planned = (PlainRLOO, PlannedRLOO) if config.pop("rloo", False) else (Plain, Planned)
    if family := config.pop("family", None):
        family_model(family, torch.float64).save_pretrained(saved := tmp_path / family)
    if config.pop("images", False):
        seen = seeing(case, torch.float64)
        seen.pop("model").save_pretrained(saved := tmp_path / "seeing")
        seen["processing_class"].text_kwargs = {}  # Mistral's makes a tensor, for which TRL's GRPO would have to pad
        how |= {**seen, **dict.fromkeys(("train_dataset", "eval_dataset"), asked())}
    in_fp64 = {"experts_implementation": "eager", "attn_implementation": "sdpa"} if family else {}
    how |= {"rows": config.pop("rows", 12), "config": config}

    def work(ranks, kind, _rank):
        if "split" in case:
            config["vllm_tensor_parallel_size"] = ranks
        found = trained(kind, tmp_path / f"ranks{ranks}", ranks, loaded(saved, **in_fp64), **how)
        trainer = found.pop("trainer")
        assert kind is plain or bool(trainer._last.plan.parents) != bool(family), "completions share prompts"
        server = getattr(trainer, "vllm_generation", None)
        sent = [] if server is None else getattr(server, "llm", server).weights
        return {**found, "sent": sent, "draws": torch.get_rng_state().tolist()}

    (expected,) = in_trainers(partial(work, 1, plain), 1, tmp_path)
    options = {"capacity_tokens": 64, "shard": "zero3" if "over the ranks" in case else "auto"}
    found = in_trainers(partial(work, ranks, partial(planned, **options)), ranks, tmp_path)
    for each in found:
        compared(each, expected)
    for each in found if "in this process" in case else found[:1]:  # a server gets all from rank 0
        assert each["sent"] == pytest.approx(expected["sent"], rel=1e-6)
    assert found[0]["draws"] != found[1]["draws"]  # ranks sample alone, though they shuffle alike
    assert any(log.get("ring_token_ratio") for log in found[0]["logs"])


class Squared(Sampled):
    """A loss of one's own: a function of TRL's, which is no sum over tokens."""

    def compute_loss(self, model, inputs, *args, **how):
        return super().compute_loss(model, inputs, *args, **how) ** 2


def test_a_loss_of_ones_own_is_that_of_trl(tmp_path, saved):
    planned, plain = (type(kind.__name__, (Squared, kind), {}) for kind in (Planned, Plain))
    found = trained(planned, tmp_path / "planned", 1, loaded(saved), **ONCE)
    compared(found, trained(plain, tmp_path / "plain", 1, loaded(saved), config=ONCE["config"]))


@pytest.mark.exhaustive
def test_batches_that_a_stream_leaves_over_weigh_as_in_trl(tmp_path, saved):
    """A pass has three batches, and two make an update."""
    config = {"loss_type": "grpo", "steps_per_generation": 1, "accelerator_config": {"dispatch_batches": False}}

    def work(kind, name, **options):
        stream = prompts(9).to_iterable_dataset()
        return trained(kind, tmp_path / name, 1, loaded(saved), config=config, train_dataset=stream, **options)

    compared(work(Planned, "planned", capacity_tokens=128), work(Plain, "plain"))


def test_a_loss_of_more_than_log_probabilities_or_that_is_no_sum_after_all_is_refused(tmp_path, saved, monkeypatch):
    class Own(Planned):
        def compute_loss(self, *args, **how):
            return super().compute_loss(*args, **how) + 0.05 * self.model.lm_head.weight.square().sum()

    with pytest.raises(ConfigError, match=r"alone; got one of lm_head\.weight of the model as well"):
        trained(Own, tmp_path, 1, loaded(saved), **ONCE)
    monkeypatch.setattr(Planned, "_is_sum", lambda _: True)
    with pytest.raises(ConfigError, match=r"loss_type: expected .* got a gradient that differs from TRL's"):
        trained(Planned, tmp_path, 1, loaded(saved), capacity_tokens=128, config={"loss_type": "vespo", **OFF})


def test_weights_of_a_microbatch_do_not_wait_for_the_device(tmp_path, saved):
    """TRL reads a number of its loss for each metric; here nobody logs them, and the device has no values to read."""

    class Waiting(Planned):
        def _weights_of_some(self, numbers, columns):
            on_device = {name: each.to("meta") for name, each in columns.items()}
            assert super()._weights_of_some(numbers.to("meta"), on_device).shape == numbers[0].shape
            return super()._weights_of_some(numbers, columns)

    config = {"max_steps": 1, "beta": 0.1}
    assert trained(Waiting, tmp_path, 1, loaded(saved), capacity_tokens=128, config=config)["logs"][0]["entropy"] > 0


def test_going_on_from_a_checkpoint_gives_the_same(tmp_path, saved):
    """With an entropy bonus that adapts, whose state TRL keeps beside the session's."""
    config = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0, "max_steps": 2}
    config |= {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 1}
    whole, again = (
        trained(Planned, tmp_path, 1, loaded(saved), capacity_tokens=128, config=config, resume=resume)
        for resume in (None, str(tmp_path / "checkpoint-1"))
    )
    names = {"loss", "grad_norm", "entropy", "entropy_coef", "reward"}
    for found, expected in zip(again["logs"][:1], whole["logs"][1:2], strict=True):
        assert [found[name] for name in names] == [expected[name] for name in names]
    assert difference(again["weights"], whole["weights"]) == 0.0


def test_what_generation_would_need_beside_a_plan_is_refused_in_one_message(tmp_path):
    config = {"use_transformers_continuous_batching": True}
    wrong = partial(trained, Planned, tmp_path, 1, model(), config=config, stages=2)
    assert wrong_places(wrong) == {"stages", *config}


def test_a_head_in_fp32_is_trls_and_its_weights_are_of_the_others_dtype(tmp_path):
    """Under autocast, where it alone computes in fp32."""
    config = {"cast_lm_head_to_fp32": True, "bf16": True, "max_steps": 1, "optim": "sgd"}
    plain = trained(Plain, tmp_path / "plain", 1, model(), config=config)
    planned = partial(trained, Planned, tmp_path / "planned", 1, capacity_tokens=128)
    compared(planned(model(), config=config), plain, tolerance=1e-2, weights=1e-3)


def test_memory_is_measured_beside_an_engine_that_sleeps_in_this_process(tmp_path, saved, monkeypatch):
    awake, made = list[int](), list[Colocated]()
    monkeypatch.setattr(Colocated, "reset_prefix_cache", lambda self: self.weights.append(0.0))
    monkeypatch.setattr("lengthwise.session.capacity.free_bytes", lambda *_: awake.append(len(made[0].awake)) or 1e12)
    kept = Colocated.__init__
    monkeypatch.setattr(Colocated, "__init__", lambda self, **how: made.append(self) or kept(self, **how))
    config = {"use_vllm": True, "vllm_enable_sleep_mode": True, "max_steps": 1}
    trained(Planned, tmp_path, 1, loaded(saved), config=config, shard="zero1")
    assert set(awake) == {0}


def test_the_mixin_alone_in_front_of_a_trainer_of_trl_is_refused():
    for name, module in PLANNED.items():
        kind = type(name, (), {"__module__": "trl.trainer"})
        with pytest.raises(ConfigError, match=rf"class Mine: expected {module}.{name}; got PlannedTrainerMixin"):
            type("Mine", (PlannedTrainerMixin, kind), {})()
        assert issubclass(getattr(import_module(module), name), PlannedTrainerMixin)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("name", sorted(set(PLANNED.values())))
def test_without_trl_the_error_names_the_extra(name, monkeypatch):
    for each in [each for each in sys.modules if each.partition(".")[0] == "trl"]:
        monkeypatch.setitem(sys.modules, each, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lengthwise\[trl\]'"):
        run_module(name)


def test_rollouts_that_no_plan_takes_are_refused(tmp_path, saved):
    def without_prompt(prompts, trainer):
        made = with_tools(prompts, trainer)
        return {**made, "prompt_ids": [[], *made["prompt_ids"][1:]]}

    for options, words in (
        ({"capacity_tokens": 128, "rollout_func": without_prompt}, "prompt: expected at least one token"),
        ({"capacity_tokens": 61}, r"max_completion_length: expected at most 60, .* got 61"),
        ({"capacity_tokens": 64}, r"expected at most 64 tokens .* got sequence \d+ of \d+ tokens"),
    ):
        with pytest.raises(LengthwiseError, match=words):
            trained(Planned, tmp_path, 1, loaded(saved), **options)
    one = {name: torch.ones(1, 1) for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    for columns, got in (
        ({"pixel_values": torch.ones(3, 3)}, "3 pixel_values for 1 images"),
        ({"pixel_values": torch.ones(1, 3), "pixel_attention_mask": torch.ones(1)}, "pixel_attention_mask"),
    ):
        with pytest.raises(DataError, match=f"images that TRL splits by row; got {got}"):
            planned_rows([{**one, **columns, "num_images": [1]}])
