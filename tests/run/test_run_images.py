"""A run file whose rows have images: trained as one plain process does, compared by verify, and files named."""

import gzip
import inspect
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from testing.images import write_image_model
from testing.small import plain_training, relative
from testing.towers import tiny_tower_config
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

import lengthwise
from lengthwise.cli.sources import lengths_of_run, listed_lengths
from lengthwise.config import DataSource, load_config
from lengthwise.core.errors import LengthwiseError
from lengthwise.data import load_dataset, load_tokenizer
from lengthwise.data.dataset import DatasetBuilder
from lengthwise.data.image_files import ImageFile
from lengthwise.engine.batch import ReadsFiles, StepBatch
from lengthwise.program import Segment
from lengthwise.run import verify_batch
from run.small_runs import (
    assert_equal_runs,
    broken_off,
    call,
    count_lines,
    losses,
    steps_of,
    told,
    train,
    whole,
    write_run,
)
from tiers import more

LORA = {"r": 4, "target_modules": ["all-linear"]}
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
def run_file(tmp_path, request):
    (tmp_path / "pictures").mkdir()
    random = np.random.default_rng(0)
    for name, (width, high) in SIZES.items():
        drawn = Image.fromarray(random.integers(0, 255, (high, width, 3), dtype=np.uint8))
        drawn.save(tmp_path / "pictures" / name)
    model = write_image_model(tmp_path / "model", getattr(request, "param", "qwen3_vl"))
    return write_run(tmp_path, ROWS, model=model, capacity_tokens=400, steps=2)


def plain_rows(folder, options):
    """Return the rows as a processor gives them. options: arguments of its image processor."""
    made = AutoImageProcessor.from_pretrained(folder / "model")
    source, token = DataSource(path=folder / "train.jsonl"), AutoConfig.from_pretrained(folder / "model").image_token_id
    dataset = load_dataset([source], tokenizer=lambda: load_tokenizer(str(folder / "model")), vocab_size=None)
    found = []
    for number, row in enumerate(ROWS):
        paths = [folder / part["path"] for part in row["messages"][0]["content"] if "path" in part]
        pixels = made(images=[Image.open(path) for path in paths], return_tensors="pt", **options) if paths else {}
        pixels = {name: each for name, each in pixels.items() if not name.startswith("num_")}
        ids, labels = (torch.tensor(each).long() for each in dataset.read(number, 0, 1000))
        kinds = dict.fromkeys(("mm_token_type_ids", "token_type_ids"), (ids == token).int())
        found.append({"input_ids": ids, "labels": labels, **kinds, **pixels})
    return found


@pytest.mark.parametrize(
    ("run_file", "ranks", "asked", "stored", "options"),
    [
        ("qwen3_vl", 1, ["shard=zero1"], "float32", {}),
        more("qwen3_vl", 2, ["shard=zero3"], "bfloat16", {}),
        ("gemma3", 2, ["global_batch.sequences=1", "steps=4", "train_towers=true"], "float32", {}),
        more("qwen3_vl", 3, ["shard=zero3", "train_towers=true"], "float32", {}),
        more("gemma4", 2, ["shard=zero3"], "float32", {}),
        more("mistral3", 2, ["shard=zero1"], "float32", {"patch_size": 8}),
        more("internvl", 2, ["shard=zero1"], "float32", {"crop_to_patches": True}),
    ],
    indirect=["run_file"],
)
def test_a_run_trains_on_images_as_one_plain_process_does(run_file, ranks, asked, stored, options):
    folder = run_file.parent
    AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=stored).save_pretrained(folder / "model")
    output = train(run_file, "--ranks", ranks, "--set", *asked, f"capacity_tokens={400 // ranks}")
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", attn_implementation="sdpa").double()
    decoder = {id(each) for part in (model.get_decoder(), model.lm_head) for each in part.parameters()}
    for each in model.parameters():
        each.requires_grad_(id(each) in decoder or "train_towers=true" in asked)
    names = inspect.signature(model.forward).parameters
    rows = [{name: each for name, each in row.items() if name in names} for row in plain_rows(folder, options)]
    steps = [json.loads(line)["sequences"] for line in (output / "ledger.jsonl").read_text().splitlines()]
    expected, _, _ = plain_training(model, rows, steps, dtype=torch.float64, lrs=[3e-4] * len(steps))
    assert max(map(relative, losses(output), expected)) < 1e-11
    saved = AutoModelForImageTextToText.from_pretrained(output / "model").state_dict()
    for name, each in model.state_dict().items():
        assert (saved[name] - each).norm() <= 1e-7 * each.norm(), name


@pytest.mark.parametrize(("run_file", "full"), [("gemma3", False), more("qwen3_vl", True)], indirect=["run_file"])
def test_verify_compares_images_and_says_how_many(run_file, capfd, monkeypatch, full):
    """Rows are cut between their images, of which one stays, here in a ring; the tower trains."""
    monkeypatch.setattr(verify_batch, "SECONDS", 1e-4)
    monkeypatch.setattr(verify_batch, "_LEAST", 8)
    asked = ["capacity_tokens=80", "train_towers=true", *["--full"] * full]
    out = told(capfd, "verify", run_file, "--ranks", 2, "--set", *asked)
    assert "tolerance 1e-12: PASS" in out
    said = next(line for line in out.splitlines() if line.startswith("exercised: "))
    assert ("5 images, 4 of them in rings" if full else " images, ") in said, said
    if not full:
        assert 35 < int(re.search(r"cut to at most (\d+) tokens", out)[1]) < 124, out
        assert " 0 of them" not in said


@pytest.mark.parametrize(("towers", "lora"), [(False, None), (True, None), (True, LORA)])
def test_plan_counts_images_as_a_run_does(run_file, towers, lora):
    keys = {"train_towers": towers, "lora": lora}
    run_file.write_text(json.dumps({**json.loads(run_file.read_text()), **keys}))
    output, found = train(run_file, "--ranks", 2), run_file.with_name("plan.json")
    assert call("plan", "--config", run_file, "--ranks", 2, "--out", found) == 0
    of_run = json.loads(gzip.decompress((output / "plans/step-000001.json.gz").read_bytes()))
    assert json.loads(found.read_text())["images"] == of_run["images"]
    wanted = sorted((tokens, *each) for tokens, each in zip(of_run["tokens"], of_run["images"], strict=True))
    for known in (lengths_of_run(run_file, load_config(run_file)), listed_lengths(str(found))):
        for wanted_tokens in (sum(of_run["tokens"]), *[None] * bool(known.steps)):  # drawn, or the first step's
            ((batch,), _) = known.batches(wanted_tokens, 1, None, devices=2)
            works = [[work for _, work in images] for images in batch.images]
            of_rows = [(length, sum(each), max(each, default=0)) for length, each in zip(batch, works, strict=True)]
            assert sorted(of_rows) == [pytest.approx(each) for each in wanted]


@pytest.mark.parametrize(("run_file", "lora"), [("gemma3", None), more("gemma3", LORA)], indirect=["run_file"])
def test_a_tower_goes_on_from_a_checkpoint(run_file, lora):
    """It has fewer updates than the run, those of steps with images."""
    keys = {"global_batch": {"sequences": 1}, "checkpoint": {"every_steps": 1, "background": False}, "lora": lora}
    run_file.write_text(json.dumps({**json.loads(run_file.read_text()), **keys, "train_towers": True, "steps": 8}))
    wanted, found = whole(run_file), broken_off(run_file, 1, after=4)
    lengthwise.train(run_file, ranks=1, resume=True)
    assert_equal_runs(found, wanted)


def test_a_broken_image_ends_the_run_with_its_row_and_file(run_file, capfd):
    """Its head is whole, so it is found when a rank decodes it."""
    path = run_file.parent / "pictures/2.png"
    path.write_bytes(path.read_bytes()[:400])
    assert call("train", run_file, "--set", "global_batch.sequences=1", "epochs=1", "steps=null") != 0
    out, err = capfd.readouterr()
    assert re.search(r"^data +4 sequences, .*, with images$", out, re.MULTILINE)
    assert re.search(r"train\.jsonl:.*pictures/2\.png: image file is truncated", " ".join(err.split()))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("stages=2", "train.jsonl:1: expected a row of text, for `stages`"),
        ("model=other", "train.jsonl:1: expected a row of text, or a model of qwen2_vl, .*; got .* images, for llava"),
        ("model=third", r"train.jsonl:1: expected 8 tokens \d+ for 1 image, by their sizes; got 0. Train with the"),
        ("train_towers=true", "train_towers: expected rows with images"),
    ],
)
def test_rows_with_images_that_cannot_train_are_refused_before_the_start(run_file, capfd, asked, expected):
    for name, family, text in (("other", "llava", "llama"), ("third", "gemma3", "gemma3_text")):
        config = tiny_tower_config(family, text, {"vocab_size": 400})
        AutoModelForImageTextToText.from_config(config).save_pretrained(run_file.parent / name)
    if asked.startswith("train"):
        (run_file.parent / "train.jsonl").write_text(json.dumps(ROWS[2]) + "\n")
    asked = [asked.replace("model=", f"model={run_file.parent}/"), f"tokenizer={run_file.parent / 'model'}"]
    assert call("train", run_file, "--ranks", 2, "--set", *asked) != 0
    assert re.search(expected, " ".join(capfd.readouterr().err.split()))


def test_the_token_of_an_image_is_refused_in_a_row_of_text_beside_rows_with_images():
    builder, ids, reader = DatasetBuilder(), np.array([1, 7, 2], dtype=np.int32), SimpleNamespace(token=7)
    builder.start_source("mine", "mine", None)
    builder.add(ids, None, None, [ImageFile("a.png", "", (2, 2))])
    builder.add(ids, None)
    batch = StepBatch(builder.finish(), [0, 1], placeholders={7: "image_token_id"}, sees=ReadsFiles(reader, None))
    assert batch.tensors([Segment(sequence=0, start=0, stop=3)])[0].tolist() == ids.tolist()
    with pytest.raises(LengthwiseError, match="got the token 7, which stands for an image"):
        batch.tensors([Segment(sequence=1, start=0, stop=3)])


@pytest.mark.exhaustive
def test_a_stream_with_images_trains_as_its_rows_read_at_the_start_and_goes_on_from_its_middle(run_file, tmp_path):
    keys = {"steps": 6, "global_batch": {"sequences": 2}, "checkpoint": {"every_steps": 1, "background": False}}
    values = {**json.loads(run_file.read_text()), **keys, "train_towers": True, "capacity_tokens": 200}
    run_file.write_text(json.dumps({**values, "data": [{"path": "train.jsonl", "max_tokens": 400}]}))
    wanted = whole(run_file, 2)
    run_file.write_text(json.dumps({**values, "data": [{"path": "train.jsonl", "max_tokens": 400, "streaming": 4}]}))
    found = broken_off(run_file, 2, after=3)
    lengthwise.train(run_file, ranks=2, resume=True)
    assert_equal_runs(
        found, wanted, rows_of=lambda output: [[row % (1 << 40) for row in step] for step in steps_of(output)]
    )


@pytest.mark.parametrize("row", [2, more(80)])
def test_an_image_that_a_stream_lacks_is_named_with_its_row(run_file, capfd, row):
    """Among the first rows it is found before an earlier run is deleted."""
    source = {"path": "train.jsonl", "max_tokens": 400, "streaming": True}
    keys = {"data": [source], "global_batch": {"sequences": 1}, "steps": 100}
    output = train(run_file)
    run_file.write_text(json.dumps({**json.loads(run_file.read_text()), **keys}))
    rows = [*(ROWS * 20)[: row - 1], chat("and this?", "gone.png")]
    run_file.with_name("train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert call("train", run_file, "--overwrite") != 0
    assert re.search(rf"train\.jsonl:{row}: .*gone\.png: nothing there", " ".join(capfd.readouterr().err.split()))
    assert (output / "model/model.safetensors").is_file() == (row == 2)
    assert count_lines(output / "ledger.jsonl") == (2 if row == 2 else 78)  # the next step was being planned


@pytest.mark.exhaustive
def test_an_image_behind_rows_of_text_is_refused_in_a_stream(run_file, capfd):
    source = {"path": "train.jsonl", "max_tokens": 400, "streaming": True}
    run_file.write_text(json.dumps({**json.loads(run_file.read_text()), "data": [source], "steps": 80}))
    rows = [*[ROWS[2]] * 70, ROWS[0]]
    run_file.with_name("train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert call("train", run_file) != 0
    expected = r"train\.jsonl:71: expected rows of text, .* without an image in its first 64 rows; got an image\. Take"
    assert re.search(expected, " ".join(capfd.readouterr().err.split()))
