"""Many steps, another plan every step: N ranks stay with one process; a run done twice has the same bits."""

import itertools
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from lengthwise.core.files import read_plan_text
from lengthwise.core.plan import Plan
from run.small_runs import (
    DTYPES,
    call,
    losses,
    make_rows,
    plain_loss,
    plain_model,
    plain_training,
    read_lines,
    relative,
    steps_of,
    train,
    write_model,
    write_run,
)


def lively_rows(count=60):
    choose = random.Random(5)
    return make_rows([choose.choice((1, 2, 3, 5, 7, 11, 16, 17, 24, 31, 47)) for _ in range(count)], seed=9)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("precision", "ranks", "tolerance"), [("fp64", 2, 1e-9), ("fp32", 3, 1e-4)])
def test_train_trajectory_of_many_steps_equals_one_process(tmp_path, precision, ranks, tolerance):
    """Also of a model whose embeddings are tied, which are saved so."""
    rows, steps = lively_rows(), 100
    keys = {"steps": steps, "precision": precision, "optimizer": {"lr": 3e-4}, "global_batch": {"sequences": 3}}
    tied = write_model(tmp_path / "model", tie_word_embeddings=True)
    output = train(write_run(tmp_path, rows, model=tied, capacity_tokens=48 // ranks, **keys), "--ranks", ranks)
    taken = steps_of(output)
    expected, _, model = plain_training(tied, rows, taken, dtype=DTYPES[precision], lrs=[3e-4] * steps)
    assert max(relative(got, loss) for got, loss in zip(losses(output), expected, strict=True)) < tolerance
    opened = AutoModelForCausalLM.from_pretrained(output / "model")
    assert opened.lm_head.weight is opened.model.embed_tokens.weight
    assert (opened.lm_head.weight - model.lm_head.weight).abs().max() < tolerance
    plans = [Plan.from_json(read_plan_text(path)) for path in sorted((output / "plans").iterdir())]
    assert all(
        (one.tokens, one.microbatches) != (other.tokens, other.microbatches) for one, other in itertools.pairwise(plans)
    )
    degrees = {piece.degree for plan in plans for microbatch in plan.microbatches for piece in microbatch.pieces}
    assert degrees == set(range(1, ranks + 1))


def test_train_twice_gives_the_same_bits_with_each_message_checked_and_without(tmp_path, request, capfd):
    found = []
    for asked in ("0", "1"):
        if asked == "1":
            request.getfixturevalue("checked_transfers")
        path = write_run(tmp_path / asked, lively_rows(), steps=2, precision="bf16", capacity_tokens=30, heads=2)
        output = train(path, "--ranks", 2)
        assert ("in testing.checked:checked" in capfd.readouterr().out) == (asked == "1")
        plans = [Plan.from_json(read_plan_text(each)) for each in sorted((output / "plans").iterdir())]
        assert any(piece.degree > 1 for plan in plans for each in plan.microbatches for piece in each.pieces)
        found.append((losses(output), (output / "model/model.safetensors").read_bytes()))
    assert found[0] == found[1]


def test_train_packed_dp_refuses_longer_sequences_before_any_process(tmp_path, capfd):
    write_model(tmp_path / "model", num_hidden_layers=4)
    write_run(tmp_path, lively_rows())
    for keys in ({}, {"offload": {"store": "disk", "path": str(tmp_path), "ratio": 0.0}}):
        path = write_run(tmp_path, steps=5, planner="packed-dp", output="none", capacity_tokens=20, **keys)
        assert call("train", path, "--ranks", 3) == 2
        told = " ".join(capfd.readouterr().err.split())
        assert "at most 20 tokens" in told
        assert "a planner that cuts sequences" in told


def test_train_fresh_weights_come_from_the_seed_whatever_the_ranks(tmp_path):
    write_model(tmp_path / "bare", weights=False)
    found = {}
    for ranks, seed in ((1, 0), (2, 0), (1, 1)):
        # Every step takes all rows, so that the seed's other use, the order, changes nothing.
        path = write_run(
            tmp_path, make_rows([9, 12, 20]), model=tmp_path / "bare", seed=seed, output=f"out{ranks}{seed}", steps=1
        )
        assert call("train", path, "--ranks", ranks) == 0
        found[ranks, seed] = losses(tmp_path / f"out{ranks}{seed}")
    assert found[1, 0] == pytest.approx(found[2, 0], rel=1e-12)
    assert abs(found[1, 0][0] - found[1, 1][0]) > 1e-5


def test_train_bf16_keeps_fp32_masters_so_that_small_updates_are_not_lost(tmp_path):
    """Weights from 1/64 to 1/32 have bf16 neighbours 1.2e-4 away; updates of 2e-5 move them only if summed in fp32."""
    optimizer = {"lr": 2e-5, "weight_decay": 0.0}
    path = write_run(tmp_path, make_rows([16] * 4), steps=30, precision="bf16", optimizer=optimizer)
    output = train(path)
    before, after = (
        torch.cat([parameter.detach().float().flatten() for parameter in model.parameters() if parameter.dim() > 1])
        for model in (
            plain_model(tmp_path / "model", torch.bfloat16),
            AutoModelForCausalLM.from_pretrained(output / "model"),
        )
    )
    chosen = (before.abs() > 1 / 64) & (before.abs() < 1 / 32)
    assert chosen.sum() > 1000
    assert (before != after)[chosen].float().mean() > 0.5
    assert (before - after)[chosen].abs().max() < 1e-3


def test_train_in_bf16_begins_as_near_to_fp64_as_plain_bf16_and_saves_the_model_that_it_evaluated(tmp_path):
    rows = make_rows([30, 12, 5, 60], seed=4)
    keys = {"precision": "bf16", "optimizer": {"lr": 3e-3}, "capacity_tokens": 30, "eval": {"every_steps": 3}}
    keys["eval"]["data"] = [{"path": "train.jsonl"}]
    output = train(write_run(tmp_path, rows, steps=3, **keys), "--ranks", 3)
    exact, plain = (
        plain_loss(plain_model(tmp_path / "model", dtype), rows, dtype) for dtype in (torch.float64, torch.bfloat16)
    )
    assert abs(losses(output)[0] - exact) <= 1.5 * abs(plain - exact) + 1e-3
    opened = AutoModelForCausalLM.from_pretrained(output / "model", attn_implementation="sdpa")
    assert next(opened.parameters()).dtype == torch.bfloat16
    loss = plain_loss(opened, rows, torch.bfloat16)
    assert relative(loss, read_lines(output / "eval.jsonl")[0]["loss"]) < 2e-2
    assert loss < exact - 0.02, "three steps on the same rows must show"


def test_train_saves_the_hugging_face_tokenizer_beside_the_model(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["[UNK]", "<end>", *"abcdefgh"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    path = write_run(tmp_path, [{"text": "a b c d"}, {"text": "h g f"}], steps=1)
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", eos_token="<end>").save_pretrained(
        tmp_path / "model"
    )
    output = train(path, "--ranks", 2)
    opened = AutoTokenizer.from_pretrained(output / "model")
    assert opened("a h")["input_ids"] == [2, 9]
    [row] = read_lines(output / "metrics.jsonl")
    assert row["num_tokens"] == 5 + 4, "each text gains the tokenizer's EOS"
