"""A run file whose rows have images: trained as one plain process does, compared by verify, and files named."""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from testing.images import image_tokenizer, write_image_model
from testing.small import plain_training, relative
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from lengthwise.config import DataSource
from lengthwise.data import load_dataset, load_tokenizer
from lengthwise.run import verify_batch
from run.small_runs import call, losses, train, write_run
from tiers import more

SIZES = {"0.png": (16, 32), "1.png": (40, 24), "2.png": (64, 64), "3.png": (20, 50)}


def chat(text, *names, answer="a cat."):
    parts = [*({"type": "image", "path": f"pictures/{name}"} for name in names), {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}


ROWS = [
    chat("what is it?", "0.png"),
    chat("which of them?", "1.png", "2.png", answer="a dog and a bird."),
    chat("hello, how are you?"),
    chat("see?", "3.png", "2.png", answer="yes, it is a longer answer about it."),
]


@pytest.fixture
def run_file(tmp_path):
    (tmp_path / "pictures").mkdir()
    random = np.random.default_rng(0)
    for name, (width, high) in SIZES.items():
        drawn = Image.fromarray(random.integers(0, 255, (high, width, 3), dtype=np.uint8))
        drawn.save(tmp_path / "pictures" / name)
    return write_run(tmp_path, ROWS, model=write_image_model(tmp_path / "model"), capacity_tokens=200, steps=2)


def plain_rows(folder):
    """Return the rows as a processor gives them."""
    made = AutoImageProcessor.from_pretrained(folder / "model")
    source = DataSource(path=folder / "train.jsonl")
    dataset = load_dataset([source], tokenizer=lambda: load_tokenizer(str(folder / "model")), vocab_size=None)
    token, found = image_tokenizer().convert_tokens_to_ids("<|image_pad|>"), []
    for number, row in enumerate(ROWS):
        paths = [folder / part["path"] for part in row["messages"][0]["content"] if "path" in part]
        pixels = made(images=[Image.open(path) for path in paths], return_tensors="pt") if paths else {}
        ids, labels = (torch.tensor(each).long() for each in dataset.read(number, 0, 1000))
        found.append({"input_ids": ids, "labels": labels, "mm_token_type_ids": (ids == token).int(), **pixels})
    return found


WHERE = [
    (1, "zero1", "float32"),
    more(2, "zero1", "float32"),
    more(3, "zero3", "float32"),
    more(2, "zero3", "bfloat16"),
]


@pytest.mark.parametrize(("ranks", "layout", "stored"), WHERE)
def test_a_run_trains_on_images_as_one_plain_process_does(run_file, ranks, layout, stored):
    folder = run_file.parent
    AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=stored).save_pretrained(folder / "model")
    output = train(run_file, "--ranks", ranks, "--set", f"shard={layout}", f"capacity_tokens={200 // ranks}")
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", attn_implementation="sdpa").double()
    model.model.visual.requires_grad_(False)
    expected, _, _ = plain_training(model, plain_rows(folder), [range(4)] * 2, dtype=torch.float64, lrs=[3e-4] * 2)
    assert max(map(relative, losses(output), expected)) < 1e-11


@pytest.mark.parametrize("full", [False, more(True)])
def test_verify_compares_images_and_says_how_many(run_file, capfd, monkeypatch, full):
    """Rows are cut between their images, of which one stays, here in a ring."""
    monkeypatch.setattr(verify_batch, "SECONDS", 1e-4)
    monkeypatch.setattr(verify_batch, "_LEAST", 8)
    assert call("verify", run_file, "--ranks", 2, "--set", "capacity_tokens=80", *["--full"] * full) == 0
    out = capfd.readouterr().out
    assert "tolerance 1e-12: PASS" in out
    said = next(line for line in out.splitlines() if line.startswith("exercised: "))
    assert ("5 images, 4 of them in rings" if full else " images, ") in said, said
    if not full:
        assert 35 < int(re.search(r"cut to at most (\d+) tokens", out)[1]) < 124, out
        assert " 0 of them" not in said


def test_a_broken_image_ends_the_run_with_its_row_and_file(run_file, capfd):
    """Its head is whole, so it is found when a rank decodes it."""
    path = run_file.parent / "pictures/2.png"
    path.write_bytes(path.read_bytes()[:400])
    assert call("train", run_file, "--set", "global_batch.sequences=1", "epochs=1", "steps=null") != 0
    said = " ".join(capfd.readouterr().err.split())
    assert "train.jsonl:" in said
    assert "pictures/2.png: image file is truncated" in said


def test_stages_refuse_rows_with_images_before_they_start(run_file, capfd):
    assert call("train", run_file, "--ranks", 2, "--set", "stages=2") != 0
    assert "train.jsonl:1: expected a row of text, for `stages`" in " ".join(capfd.readouterr().err.split())
