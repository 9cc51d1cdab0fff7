"""Many steps, another plan every step: N ranks stay with one process; a run done twice has the same bits."""

import random

import pytest
import torch
from testing.small import make_rows, plain_model, write_model
from transformers import AutoModelForCausalLM

from run.small_runs import call, losses, plans_of, read_lines, train, write_run

KEYS = {"heads": 2, "recompute": "layer"}  # of every plan of a run


def lively_rows(count=60):
    choose = random.Random(5)
    return make_rows([choose.choice((1, 2, 3, 5, 7, 11, 16, 17, 24, 31, 47)) for _ in range(count)], seed=9)


@pytest.mark.exhaustive
def test_train_twice_gives_the_same_bits_with_each_message_checked_and_without(tmp_path, request, capfd):
    bits = []
    for asked in ("0", "1"):
        if asked == "1":
            request.getfixturevalue("checked_transfers")
        path = write_run(tmp_path / asked, lively_rows(), steps=2, precision="bf16", capacity_tokens=30, **KEYS)
        output = train(path, "--ranks", 2)
        assert ("in testing.checked:checked" in capfd.readouterr().out) == (asked == "1")
        found = [each for plan in plans_of(output) for each in plan.microbatches]
        assert {each.recompute for each in found} == {KEYS["recompute"]}
        assert {piece.heads for each in found for piece in each.pieces if piece.degree > 1} == {2}
        bits.append((losses(output), (output / "model/model.safetensors").read_bytes()))
    assert bits[0] == bits[1]


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
    path = write_run(tmp_path, make_rows([16] * 4), steps=12, precision="bf16", optimizer=optimizer)
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
    output = train(path)
    opened = AutoTokenizer.from_pretrained(output / "model")
    assert opened("a h")["input_ids"] == [2, 9]
    [row] = read_lines(output / "metrics.jsonl")
    assert row["num_tokens"] == 5 + 4, "each text gains the tokenizer's EOS"
