"""A run file whose rows have images: trained as one plain process does, compared by verify, and files named."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from testing.images import image_tokenizer, write_image_model
from testing.small import plain_training, relative
from testing.towers import tiny_tower_config
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from lengthwise.config import DataSource
from lengthwise.core.errors import LengthwiseError
from lengthwise.data import load_dataset, load_tokenizer
from lengthwise.data.dataset import DatasetBuilder
from lengthwise.data.image_files import ImageFile
from lengthwise.engine.batch import ReadsFiles, StepBatch
from lengthwise.program import Segment
from lengthwise.run import verify_batch
from run.small_runs import call, losses, told, train, write_run
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


@pytest.mark.parametrize(("ranks", "layout", "stored"), [(1, "zero1", "float32"), more(2, "zero3", "bfloat16")])
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
    out = told(capfd, "verify", run_file, "--ranks", 2, "--set", "capacity_tokens=80", *["--full"] * full)
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


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("stages=2", "a row of text, for `stages`"),
        ("model=other", "a row of text, or a model of qwen2_vl, .*; got one with images, for gemma3"),
    ],
)
def test_rows_with_images_that_cannot_train_are_refused_before_the_start(run_file, capfd, asked, expected):
    tiny_tower = tiny_tower_config("gemma3", "gemma3_text", {"vocab_size": 400})
    AutoModelForImageTextToText.from_config(tiny_tower).save_pretrained(run_file.parent / "other")
    tokenizer = f"tokenizer={run_file.parent / 'model'}"
    assert call("train", run_file, "--ranks", 2, "--set", asked.replace("=o", f"={run_file.parent}/o"), tokenizer) != 0
    assert re.search(f"train.jsonl:1: expected {expected}", " ".join(capfd.readouterr().err.split()))


def test_the_token_of_an_image_is_refused_in_a_row_of_text_beside_rows_with_images():
    builder, ids, reader = DatasetBuilder(), np.array([1, 7, 2], dtype=np.int32), SimpleNamespace(token=7)
    builder.start_source("mine", "mine", None)
    builder.add(ids, None, None, [ImageFile("a.png", "", (2, 2))])
    builder.add(ids, None)
    batch = StepBatch(builder.finish(), [0, 1], placeholders={7: "image_token_id"}, sees=ReadsFiles(reader, None))
    assert batch.tensors([Segment(sequence=0, start=0, stop=3)])[0].tolist() == ids.tolist()
    with pytest.raises(LengthwiseError, match="got the token 7, which stands for an image"):
        batch.tensors([Segment(sequence=1, start=0, stop=3)])
