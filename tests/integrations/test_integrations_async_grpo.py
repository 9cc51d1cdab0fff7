"""AsyncGRPO on ranks gives what plain TRL gives in one process: weights, those of the server, and logged numbers."""

from collections import defaultdict
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch

pytest.importorskip("trl")  # an extra

from async_runs import GROUP, Plain, Planned, Worker, rollouts, trained
from grpo_runs import compared
from preferences import family_model, lora
from trainers import difference, in_trainers, wrong_places
from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset
from trl.experimental.async_grpo.packing import TreeRow

from lengthwise.core.errors import ConfigError, DataError, RankError
from lengthwise.integrations import async_grpo
from tiers import more

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated")  # TRL and peft read it

OF_ROWS = ("perf/", "batch/row_", "batch/samples_per_row", "batch/packing_ratio", "batch/pad_frac")
OTHERS = (*OF_ROWS, "batch/forwarded_tokens_per_step", "batch/microbatches_per_step")  # a plan packs otherwise
CASES = {
    "over the ranks": {},
    "in two batches, an epoch": {"gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 1},
    "adapters": {"epsilon_high": 0.28, "weight_sync_steps": 2},
    "adapters alone sent, over the ranks": {},
    "at another temperature": {"temperature": 0.7},
}


@pytest.mark.parametrize(
    ("case", "ranks"),
    [("over the ranks", 2), *[more(case, ranks) for case, ranks in zip(CASES, (3, 3, 1, 2, 3), strict=True)]],
)
def test_async_grpo_is_trls(case, ranks, tmp_path, saved):
    def work(ranks, kind, _rank):
        config = dict(CASES[case])
        batches = config.pop("gradient_accumulation_steps", 1) if kind is not Plain else 1
        how = {"peft_config": lora()} if "adapters" in case else {}
        how |= {"sends_adapters": "alone" in case}
        how |= {"config": {**config, "gradient_accumulation_steps": batches}, "update": 12 // batches}
        found = trained(kind, tmp_path / f"ranks{ranks}", ranks, saved, **how)
        return {name: found[name] for name in ("logs", "weights", "sent", "calls")}

    (expected,) = in_trainers(partial(work, 1, Plain), 1, tmp_path)
    options = {"capacity_tokens": 128 if ranks == 1 else 64, "shard": "zero3" if "over" in case else "auto"}
    found = in_trainers(partial(work, ranks, partial(Planned, **options)), ranks, tmp_path)
    compared(found[0], expected, but=OTHERS)
    assert found[0]["calls"] == expected["calls"]
    for got, wanted in zip(found[0]["sent"], expected["sent"], strict=True):
        assert got == pytest.approx(wanted, rel=1e-6)
    tokens = [sum(len(each.input_ids) for each in list(rollouts())[first : first + 12]) for first in (0, 12, 24)]
    assert [log["batch/forwarded_tokens_per_step"] for log in found[0]["logs"][:3]] == tokens
    assert any(log.get("ring_token_ratio") for log in found[0]["logs"]) == (ranks > 1)
    assert not any(each["sent"] or each["calls"] for each in found[1:])


def test_a_rollout_that_trl_drops_is_trained(tmp_path, saved):
    row = TreeRow()
    for each in list(rollouts())[:12]:
        row.add(asdict(each))
    whole, once = len(row.tokens), {"max_steps": 1}
    dropped, expected = (
        trained(Plain, tmp_path, 1, saved, config={**once, "token_budget": budget}) for budget in (90, whole)
    )
    found = trained(Planned, tmp_path, 1, saved, config=once, capacity_tokens=128)
    rows = [len(each.input_ids) for each in list(rollouts())[:12] if any(each.completion_mask)]
    assert (len(rows), found["trainer"]._last.num_tokens) == (11, sum(rows))  # one that trains nothing does not run
    assert dropped["logs"][0]["batch/dropped_oversize_total"] == 1.0
    compared(found, expected, but=(*OTHERS, "sample/"))  # TRL has read one more, to see that it does not fit
    assert difference(found["weights"], dropped["weights"]) > 1e-3


def test_rollouts_of_weights_that_are_too_old_are_not_trained(tmp_path, saved):
    fresh, once = list(rollouts(12)), {"max_steps": 1, "max_staleness": 1}  # the first step has version 1
    stale = [replace(each, model_version=-1, advantage=9.0) for each in fresh]
    expected, found = (
        trained(Planned, tmp_path, 1, saved, samples=samples, config=once, capacity_tokens=128)["logs"][0]
        for samples in (fresh, [*stale, *fresh])
    )
    assert found["sample/dropped_stale_total"] == 12.0
    assert (found["loss"], found["grad_norm"]) == (expected["loss"], expected["grad_norm"])


@pytest.mark.exhaustive
def test_going_on_from_a_checkpoint_gives_the_same(tmp_path, saved, monkeypatch):
    """The worker goes on at the first prompt that no update had."""
    monkeypatch.setattr("trl.experimental.async_grpo.async_grpo_trainer.AsyncRolloutWorker", Worker)
    config = {"save_strategy": "steps", "save_steps": 2}
    whole = trained(Planned, tmp_path, 1, saved, config=config, capacity_tokens=128)
    rest, checkpoint = list(rollouts())[24:], str(tmp_path / "checkpoint-2")
    again = trained(Planned, tmp_path, 1, saved, config=config, capacity_tokens=128, samples=rest, resume=checkpoint)
    for name in ("loss", "grad_norm"):
        assert again["logs"][0][name] == whole["logs"][2][name]
    assert difference(again["weights"], whole["weights"]) == 0.0
    assert again["trainer"].rollout_worker._loop_kwargs == {"dataset_start_index": 24 // GROUP}


def test_what_a_plan_cannot_keep_is_refused_in_one_message(tmp_path, saved, monkeypatch):
    wrong = partial(trained, Planned, tmp_path, 1, saved, config={"token_budget": 64}, stages=2)
    assert wrong_places(wrong) == {"token_budget", "stages"}
    with pytest.raises(ConfigError, match="evaluate: expected train"):
        trained(Planned, tmp_path, 1, saved, config={"eval_on_start": True}, capacity_tokens=128)
    monkeypatch.setattr(async_grpo, "AsyncRolloutWorker", Worker)
    with pytest.raises(ConfigError, match=r"max_completion_length: expected at most 127, .* got 2048"):
        trained(Planned, tmp_path, 1, saved, capacity_tokens=128)


def test_rollouts_that_no_update_can_take_end_the_training_by_name(tmp_path, saved):
    with pytest.raises(DataError, match=r"rollout of group 0: expected at most 64 tokens, .*; got 100"):
        trained(Planned, tmp_path, 1, saved, capacity_tokens=64)
    samples = list(rollouts())
    for each in samples:
        each.completion_mask[:] = 0
    with pytest.raises(DataError, match="a token that trains in each update; got none in 12 rollouts"):
        trained(Planned, tmp_path, 1, saved, samples=samples, capacity_tokens=128)


def test_a_rank_that_waits_for_the_queue_of_the_first_gets_signs_of_it(monkeypatch):
    """Else the group's timeout ends a wait that is long, and Ctrl-C on the first rank leaves the others waiting."""
    monkeypatch.setattr(async_grpo, "_SIGN_SECONDS", 0.0)
    sent, looks = [], iter([None, None, KeyboardInterrupt("pressed")])

    def check_health(_):
        if (error := next(looks)) is not None:
            raise error

    queue = Worker(list(rollouts())[:6]).rollout_buffer
    reader = RolloutQueueDataset(queue, lambda: 0, check_health, stale_after_s=300.0, metrics=defaultdict(list))
    first = iter(async_grpo._Shared(reader, 4, log=lambda _: None, share=lambda given: (sent.append(given), given)[1]))
    update = next(first)
    with pytest.raises(KeyboardInterrupt):
        next(first)
    assert [each if isinstance(each, str) else each and len(each) for each in sent] == [
        *[*[None] * 4, 4],
        *[*[None] * 5, "KeyboardInterrupt: pressed"],  # of two rollouts, and three looks at an empty queue
    ]
    other = iter(async_grpo._Shared(None, 4, log=lambda _: None, share=lambda _: sent.pop(0)))
    assert repr(next(other)) == repr(update)  # arrays of its own
    with pytest.raises(RankError, match="rank 0: expected rollouts; got KeyboardInterrupt: pressed"):
        next(other)


def test_all_ranks_end_when_the_worker_of_the_first_fails(tmp_path, saved):
    """After an update in which one of them has no token that trains."""
    samples = list(rollouts())[:13]
    for each in samples[:12]:
        each.completion_mask[:] = 0
    samples[1].completion_mask[-3:] = 1  # of 100 tokens; the other rank has those in the middle

    def work(_rank):
        with pytest.raises((RuntimeError, RankError)) as raised:
            trained(Planned, tmp_path, 2, saved, samples=samples, capacity_tokens=64)
        return str(raised.value)

    first, second = in_trainers(work, 2, tmp_path)
    assert first == "no rollout for 300.0 seconds"
    assert "got RuntimeError: no rollout for 300.0 seconds" in second


def test_a_balance_loss_that_depends_on_packs_is_refused(tmp_path):
    family_model("mixtral", torch.float64).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef: expected 0; got 0\.001, but TRL counts"):
        trained(Planned, tmp_path, 1, tmp_path / "model")
