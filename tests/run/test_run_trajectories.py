"""A run done twice has the same bits; what it begins with, and what it saves beside the model."""

import random

import pytest
import torch
from testing.small import make_rows, plain_loss, relative, write_model
from transformers import AutoTokenizer

from data.stores import save_words
from lengthwise.models import build_model, find_model, plain_attention
from run.small_runs import losses, plans_of, read_lines, train, write_run

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


def test_train_fresh_weights_are_those_of_the_seed_on_any_ranks(tmp_path):
    source, rows = find_model(str(write_model(tmp_path / "bare", weights=False))), make_rows([9, 12, 20])
    path = write_run(tmp_path, rows, model=tmp_path / "bare", seed=1, steps=1)
    (loss,) = losses(train(path, "--ranks", 2))
    models = [build_model(source, seed=seed, attention=plain_attention(source)).double() for seed in (1, 0)]
    ours, others = (plain_loss(each, rows, torch.float64) for each in models)
    assert relative(loss, ours) < 1e-5 < relative(loss, others)


def test_train_saves_the_hugging_face_tokenizer_beside_the_model(tmp_path):
    path = write_run(tmp_path, [{"text": "a b c d"}, {"text": "h g f"}], steps=1)
    save_words(tmp_path / "model", ["[UNK]", "<end>", *"abcdefgh"], eos_token="<end>")
    output = train(path)
    opened = AutoTokenizer.from_pretrained(output / "model")
    assert opened("a h")["input_ids"] == [2, 9]
    [row] = read_lines(output / "metrics.jsonl")
    assert row["num_tokens"] == 5 + 4, "each text gains the tokenizer's EOS"
