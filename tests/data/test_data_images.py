"""Chats with images: the ids of the model's processor, kept with paths and patches, and files that cannot be read."""

import base64
import copy
import hashlib
import json
import re
import sys
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from testing.images import IMAGE, PROCESSORS, image_model, whole_processor, write_image_processor
from transformers.image_utils import load_image

from data.local_feeds import local_feeds
from data.stores import prepare
from lengthwise.config import DataSource, GlobalBatch
from lengthwise.core.errors import LengthwiseError
from lengthwise.data import NO_LOSS, ByteTokenizer, load_dataset, load_tokenizer
from lengthwise.data.image_store import is_kept, keep_image
from lengthwise.data.prepare import prepare_folder, to_prepare
from lengthwise.models.images import joined_images

TURNED = 6  # of EXIF: the picture lies on its side
ANSWER = {"role": "assistant", "content": "a cat."}


def user(*parts):
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def image(**path):
    return {"type": "image", **path}


ROWS = [
    {"messages": [{"role": "user", "content": "what is it?"}, ANSWER], "images": ["a.png", "sub/b.jpg"]},
    {"messages": [user("see ", image(path="a.png"), " and", image(url="c.png")), ANSWER]},
    {"messages": [user(image(), image(image="c.png"), "?"), ANSWER, user("more?"), ANSWER], "image": "sub/b.jpg"},
    {"messages": [{"role": "user", "content": "hello"}, ANSWER], "images": []},
    {
        "prompt": [user({"type": "image_url", "image_url": {"url": "a.png"}}, "?")],
        "completion": [{"role": "assistant", "content": [{"type": "text", "text": "yes."}, image(path="c.png")]}],
    },
]
FILES = [["a.png", "sub/b.jpg"], ["a.png", "c.png"], ["sub/b.jpg", "c.png"], [], ["a.png", "c.png"]]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    random = np.random.default_rng(0)
    for name, (width, high) in {"a.png": (16, 40), "sub/b.jpg": (70, 20), "c.png": (33, 33)}.items():
        exif = Image.Exif()
        exif[0x0112] = TURNED if name == "sub/b.jpg" else 1
        drawn = Image.fromarray(random.integers(0, 255, (high, width, 3), dtype=np.uint8))
        drawn.save(tmp_path / name, exif=exif)
    write_image_processor(tmp_path / "model")
    return tmp_path


def load(folder, rows, tokenizer=None, read=load_dataset, **keys):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    make = tokenizer or (lambda: load_tokenizer(str(folder / "model")))
    return read([DataSource(path=path, **keys)], tokenizer=make, vocab_size=None)


@pytest.mark.parametrize("family", [*PROCESSORS])
def test_ids_and_patches_are_those_of_the_processor(folder, family):
    """Images have no loss, even those of the assistant; a picture that lies on its side stands up."""
    config = image_model(family).config
    made = whole_processor(family, config)
    write_image_processor(folder / "model", family, config)
    dataset = load(folder, ROWS)
    for number, (row, files) in enumerate(zip(copy.deepcopy(ROWS), FILES, strict=True)):
        turns = [*row.get("messages", ()), *row.get("prompt", ()), *row.get("completion", ())]
        for turn in turns:
            turn["content"] = turn["content"] if isinstance(turn["content"], list) else user(turn["content"])["content"]
        if row.get("images"):
            turns[0]["content"] = [*[image() for _ in files], *turns[0]["content"]]
        for part in (part for turn in turns for part in turn["content"] if part["type"] != "text"):
            part["type"] = "image"
        text = made.tokenizer.apply_chat_template(turns, tokenize=False)
        pictures = [load_image(str(folder / file)) for file in files]
        expected = made(text=[text], images=[pictures] if pictures else None, return_tensors="pt")
        ids, labels = dataset.read(number, 0, int(dataset.lengths[number]))
        assert ids.tolist() == expected["input_ids"][0].tolist()
        found = [load_tokenizer(str(folder / "model")).images.columns(each, "") for each in dataset.images(number)]
        for name in {"pixel_values", "image_grid_thw", "image_position_ids", "image_sizes"} & {*expected}:
            assert torch.equal(joined_images([each[name] for each in found], name), expected[name])
        answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        texts = ["".join(part.get("text", "") for part in answer) for answer in answers]
        said = re.sub(r"<\|(vision_)?(start|end|boi|eoi)\|>", "", made.tokenizer.decode(labels[labels != NO_LOSS]))
        assert "".join(said.split()) == "".join(f"{text}<|im_end|>" for text in texts).replace(" ", "")
    assert dataset.first_with_images == 0
    assert IMAGE in dataset.read(4, 0, 200)[0]


def test_prepared_rows_have_the_images_of_rows_in_memory_and_other_images_are_other_data(folder):
    name, here = str(folder / "model"), load(folder, ROWS)
    prepare(
        [DataSource(path=folder / "rows.jsonl")], folder / "tokens", name=name, tokenizer=lambda: load_tokenizer(name)
    )
    there = load_dataset([DataSource(path=folder / "tokens")], tokenizer=lambda: load_tokenizer(name), vocab_size=None)
    assert there.digest() == here.digest()
    assert there.first_with_images == 0
    assert [list(there.images(row)) for row in range(5)] == [list(here.images(row)) for row in range(5)]
    there.read(1, 0, 5)  # compared with its digest
    file, reader = here.images(0)[0], load_tokenizer(name).images
    before = reader.columns(file, "rows.jsonl:1")["pixel_values"]
    with pytest.raises(LengthwiseError, match=r"patches \[10, 4\], and \(2, 2\) when it was tokenized"):
        reader.columns(file._replace(grid=(2, 2)), "rows.jsonl:1")
    Image.new("RGB", (16, 40)).save(file.path)
    with pytest.raises(LengthwiseError, match=r"rows.jsonl:1: expected an image .*got .*a\.png: another file"):
        reader.columns(file, "rows.jsonl:1")
    assert load(folder, ROWS).digest() != here.digest()
    Image.new("RGB", (90, 40)).save(file.path)
    assert load(folder, ROWS).lengths[0] != here.lengths[0]
    assert before.shape == (file.grid[0] * file.grid[1], 96)


INSIDE = datasets.Features(
    {
        "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
        "images": datasets.List(datasets.Image()),
    }
)


@pytest.mark.parametrize("form", ["table", "folder", "dataset", "prepared", "data URLs"])
def test_images_inside_of_rows_are_those_of_files_beside_them(folder, monkeypatch, form):
    """They are written to the cache once, where a process that decodes them finds them."""
    monkeypatch.setenv("LENGTHWISE_CACHE", str(folder / "cache"))
    rows = [{"messages": ROWS[0]["messages"], "images": ROWS[0]["images"]}, ROWS[3]]
    here, source = load(folder, rows), folder / "inside.parquet"
    bytes_of = [[{"bytes": (folder / each).read_bytes(), "path": None} for each in row["images"]] for row in rows]
    table = datasets.Dataset.from_list(
        [{**row, "images": images} for row, images in zip(rows, bytes_of, strict=True)], features=INSIDE
    )
    if form == "folder":
        table.save_to_disk(source := folder / "inside")
    elif form == "data URLs":
        urls = ["data:image/png;base64," + base64.b64encode(each["bytes"]).decode() for each in bytes_of[0]]
        parts = [{"type": "image_url", "image_url": {"url": each}} for each in urls]
        turns = [user(*parts, rows[0]["messages"][0]["content"]), ANSWER]
        (source := folder / "urls.jsonl").write_text(
            "".join(json.dumps(each) + "\n" for each in ({"messages": turns}, ROWS[3]))
        )
    else:
        table.to_parquet(source)
    sources = [
        DataSource(dataset="parquet", split="train", data_files=[str(source)])
        if form == "dataset"
        else DataSource(path=source)
    ]
    tokenizer = lambda: load_tokenizer(str(folder / "model"))  # noqa: E731
    if form == "prepared":
        plan = to_prepare(sources, tokenizer_name=str(folder / "model"), tokenizer=tokenizer)
        prepare_folder(plan, folder / "tokens")
        sources = [DataSource(path=folder / "tokens")]
    there = load_dataset(sources, tokenizer=tokenizer, vocab_size=None)
    assert there.digest() == here.digest()
    reader, files = tokenizer().images, zip(there.images(0), here.images(0), strict=True)
    assert all(torch.equal(*(reader.columns(each, "")["pixel_values"] for each in pair)) for pair in files)
    kept = [*(folder / "cache/images").rglob("?" * 64)]
    assert len(kept) == 2
    assert is_kept(str(kept[0])), "and no other file, by a path of a dataset"
    assert not is_kept(str(folder / "cache/images/../../a.png"))
    content = kept[0].read_bytes()
    kept[0].write_bytes(content[::-1])
    assert Path(keep_image(content)).read_bytes() == content


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [user("a"), ANSWER], "images": ["gone.png"]}, r"gone\.png: nothing there"),
        ({"messages": [user("a", image(path="rows.jsonl")), ANSWER]}, r"rows\.jsonl: cannot identify image file"),
        ({"messages": [user("a", image(path="script.png")), ANSWER]}, r"script\.png: cannot identify image file"),
        ({"messages": [user("a", image(path="thin.png")), ANSWER]}, r"thin\.png: absolute aspect ratio"),
        ({"messages": [user("a", image()), ANSWER], "images": ["a.png", "a.png"]}, "1 part of .*, and 2 paths"),
        ({"messages": [user("a <|image_pad|>", image(path="a.png")), ANSWER]}, "2 places of images by"),
        ({"messages": [user("a"), ANSWER], "images": ["a.png"], "image": "b.png"}, "one column of images"),
        ({"messages": [user("a", image(path=".")), ANSWER]}, "a folder"),
        ({"messages": [{"role": "user", "content": "<image>a"}, ANSWER], "images": ["a.png"]}, 'no "<image>" in texts'),
        ({"messages": [user(image(url="https://a/b.png")), ANSWER]}, "images as paths of files; got .*https"),
        ({"messages": [user(image(url="data:image/png;base64,?")), ANSWER]}, "a data URL with broken base64"),
        ({"text": "a", "images": ["a.png"]}, '"images": images outside of chats'),
    ],
)
def test_images_that_cannot_train_are_named_by_row_and_file(folder, row, said):
    Image.new("RGB", (2, 900)).save(folder / "thin.png")
    (folder / "script.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n%%EndComments\n")
    with pytest.raises(LengthwiseError, match=rf"rows\.jsonl:2: .*{said}"):
        load(folder, [ROWS[3], row])
    dataset = load(folder, [ROWS[3], row], bad_rows="skip")
    assert dataset.skipped == {"bad": 1}


def test_what_a_processor_makes_nothing_of_is_named(folder):
    write_image_processor(folder / "model", "mistral3", image_model("mistral3").config)
    Image.new("RGB", (900, 2)).save(folder / "a.png")
    with pytest.raises(LengthwiseError, match=r"rows\.jsonl:1: .*a\.png: 900 x 2 pixels, of which the .* keeps none"):
        load(folder, [ROWS[1]])
    settings = folder / "model/processor_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "image_break_token": "[NONE]"}))
    with pytest.raises(LengthwiseError, match=r"a tokenizer that has not all of \[IMG\], \[NONE\]"):
        load(folder, [ROWS[2]])


def test_rows_of_a_stream_have_the_images_of_rows_read_at_the_start_and_those_of_remote_none(folder):
    here, sources = load(folder, ROWS), [DataSource(path=folder / "rows.jsonl", max_tokens=400)]
    how = {"tokenizer_name": str(folder / "model")}
    with local_feeds(sources, {"streaming": 1}, ranks=2, sees=True, **how) as (there, _):
        batches = [islice(each.batches(GlobalBatch(sequences=1)), 9) for each in there]
        for number, pair in enumerate(zip(*batches, strict=True)):
            row = number % len(ROWS)
            for dataset, batch in zip(there, pair, strict=True):
                assert batch.digest == hashlib.sha256(here.row_digests(row, row + 1).tobytes()).hexdigest()
                (found,), length = batch.ids.tolist(), int(here.lengths[row])
                assert list(dataset.images(found)) == list(here.images(row))
                dataset.read_ahead([(found, length - 5, length)])
                for start in (0, length - 5):
                    assert all(map(np.array_equal, dataset.read(found, start, length), here.read(row, start, length)))
    for key in ("remote", "streaming"):
        with (
            local_feeds(sources, {key: 1}, **how) as ((dataset,), _),
            pytest.raises(LengthwiseError, match=r"rows of text, as with `remote`, .*; got an image"),
        ):
            next(dataset.batches(GlobalBatch(sequences=5)))


def test_images_are_refused_without_a_processor(folder, monkeypatch):
    with pytest.raises(LengthwiseError, match="a row of text, for this tokenizer; got an image, and tokenizer bytes"):
        load(folder, ROWS[:1], ByteTokenizer)
    with pytest.raises(LengthwiseError, match=r"LENGTHWISE_CACHE: expected a folder .*; got off"):  # no fault of a row
        load(folder, [{"messages": [user(image(url="data:image/png;base64,YQ==")), ANSWER]}], bad_rows="skip")
    (folder / "model/preprocessor_config.json").unlink()
    with pytest.raises(LengthwiseError, match="got an image, and no image processor at"):
        load(folder, ROWS[:1])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(LengthwiseError, match="expected the package pillow"):
        load(folder, ROWS[:1], bad_rows="skip")
