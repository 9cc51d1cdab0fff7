"""Smaller benchmarks: forecasts, batches, loaders, rollouts, planners that they register, ratios of `end_to_end.py`."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

import forecasts
import gains
from end_to_end import ratios, refuse_unequal, waiting_share
from lengthwise.core.errors import ConfigError, PlanError
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.planner import PlanOptions, plan_step, registry
from lengthwise.program import check_plan
from rival_planners import register_rivals
from rivals import PACKED, TimedStep


@pytest.mark.parametrize("run", [run for run in forecasts.RUNS if run.long], ids=lambda run: f"{run.model} {run.what}")
def test_published_rings_are_forecast_to_6_percent(run: forecasts.Run) -> None:
    assert forecasts.forecast(run)[0] == pytest.approx(run.seconds, rel=0.06)


def test_published_short_steps_lie_between_their_two_prices() -> None:
    short = [run for run in forecasts.RUNS if not run.long]
    for none, layer in zip(short[::2], short[1::2], strict=True):
        assert (none.recompute, layer.recompute) == ("none", "layer")
        assert forecasts.forecast(none)[0] < none.seconds < forecasts.forecast(layer)[0]


def test_the_page_has_what_the_command_prints() -> None:
    page = Path(forecasts.__file__).parents[1] / "docs/benchmarks/forecasts.md"
    assert "\n".join(forecasts.lines()) in page.read_text(encoding="utf-8")


@pytest.mark.exhaustive
def test_the_page_of_gains_has_what_simulate_answers() -> None:
    page = (Path(gains.__file__).parents[1] / "docs/benchmarks/gains.md").read_text(encoding="utf-8")
    line = " | ".join(gains.cells(gains.answer_of(*gains.CASES[0])))
    assert f"| Qwen3-8B, github, 8 | {line} |" in page
    line = " | ".join(gains.by_change(*gains.BATCHES["Qwen3-8B, 16K each, 8"]))
    assert f"| Qwen3-8B, 16K each, 8 | {line} |" in page


COST = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))
CLUSTER = Cluster(ranks=4, capacity_tokens=8192)
TOKENS = [20_000, 8_000, 3_000, 700]


class Scheduler:
    """Stands for Megatron-Core's: one sub-batch, sample 0 on all ranks but the last, the others there."""

    def __init__(self, most_tokens, group):
        self.ranks = group.size()

    def get_groups_and_subsamples(self, samples, _config):
        rest = [number for number, _ in samples[1:]]
        return None, [[[0]] * (self.ranks - 1) + [rest]]


def test_registered_rivals_make_plans_that_run(monkeypatch):
    pytest.importorskip("highspy")
    monkeypatch.setattr(registry, "_registered", {})
    scheduler = "megatron.core.pipeline_parallel.hybrid_cp_schedule"
    monkeypatch.setitem(sys.modules, scheduler, SimpleNamespace())
    with pytest.raises(ConfigError, match=r"BalancedCPScheduler.*megatron-core==0\.16\.1"):
        register_rivals(["megatron-core"])
    monkeypatch.setitem(sys.modules, scheduler, SimpleNamespace(BalancedCPScheduler=Scheduler))
    register_rivals(["lengthwise", "flexsp", "megatron-core"])
    asked = ("flexsp", "power-of-two", "megatron-core")
    plans = {name: plan_step(TOKENS, CLUSTER, COST, PlanOptions(planner=name, layers=32)) for name in asked}
    for plan in plans.values():
        check_plan(plan)
    seconds = {name: plan.notes["predicted_seconds"] for name, plan in plans.items()}
    assert seconds["flexsp"] <= seconds["power-of-two"] * (1 + 1e-9)  # it has the groups of the other
    pieces = [piece for each in plans["megatron-core"].microbatches for piece in each.pieces]
    assert [(piece.degree, piece.sequences) for piece in pieces] == [(3, (0,)), (1, (1,)), (1, (2, 3))]
    with pytest.raises(PlanError, match=r"at most 96 ranks x sequences; got 4 ranks x 25 sequences"):
        plan_step([9] * 25, CLUSTER, COST, PlanOptions(planner="flexsp"))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_all_kinds_of_rollouts_and_shared_prompts_train_the_same(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    import rollouts

    heads = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=rollouts.VOCAB, num_hidden_layers=1, **heads)
    AutoModelForCausalLM.from_config(config, dtype="float32").save_pretrained(tmp_path / "model")
    sizes = rollouts.Sizes(completions=16, longest=64, steps=2, layers=1, hidden=32, at_once=8)
    found = list(rollouts.rows(sizes, tmp_path))
    assert [row[0] for row in found] == list(rollouts.CASES)
    assert all(float(seconds) > 0 for row in found for seconds in row[1:3])
    assert [row[0] for row in rollouts.shared_rows(sizes)] == list(rollouts.SHARED)


def step(way: str, repeat: int, seconds: float, loss: float = 1.0, batch: int = 0) -> TimedStep:
    values = {"way": way, "repeat": repeat, "batch": batch, "seconds": seconds, "loss": loss}
    return TimedStep(work_seconds=seconds / 2, waited=(1.0, 0.0), **values)


def test_ratios_are_of_all_batches_of_a_repeat_and_leave_out_the_first_round() -> None:
    steps = [step("lengthwise", 0, 9.0), step(PACKED, 0, 1.0)]
    for repeat, slow in ((1, 3.0), (2, 2.0), (3, 2.5)):
        steps += [step("lengthwise", repeat, 1.0, batch=0), step("lengthwise", repeat, 1.0, batch=1)]
        steps += [step(PACKED, repeat, slow, batch=0), step(PACKED, repeat, 1.0, batch=1)]
    found = ratios(steps, lambda each: each.seconds)[PACKED]
    assert (found.least, found.median, found.most) == (1.5, 1.75, 2.0)
    assert ratios(steps, lambda each: each.seconds)["lengthwise"].median == 1.0
    assert waiting_share(steps, PACKED) == pytest.approx(6 / (2 * (3 + 2 + 2.5 + 3)))


def test_unequal_losses_end_the_benchmark() -> None:
    same = [step("lengthwise", 1, 1.0, loss=2.0), step(PACKED, 1, 1.0, loss=2.000001)]
    refuse_unequal(same)
    with pytest.raises(SystemExit, match="same losses"):
        refuse_unequal([*same, step("static", 1, 1.0, loss=2.0001)])
