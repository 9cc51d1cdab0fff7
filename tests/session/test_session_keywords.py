"""Keywords of a session are the settings of a run file: the same words, one table of what does not go together."""

from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from testing.small import small_model, write_model
from torch.optim import SGD

from lengthwise import Session, StoredModel, build_config
from lengthwise.config.together import RUN_FILE, SESSION, TABLE, plain
from lengthwise.core.errors import LengthwiseError, Problems
from lengthwise.session.keywords import SessionKeywords, SessionOptions, read_keywords

DOCS = Path(__file__).parents[2] / "docs"
MINIMAL = {"model": "tiny", "data": [{"python_stdlib": True}], "output": "out"}
TRIED = {
    **dict.fromkeys(["steps", "epochs", "ranks_per_node", "virtual"], (2,)),
    **dict.fromkeys(["measurements", "capacity_tokens"], ("auto",)),
    "planner": ("static",), "shard": ("zero3",), "stages": (2, 1), "optimizer": (None,), "quantization": ("nf4",),
    "train_towers": (True,), "lora": (None,), "precision": ("fp64",),
}  # fmt: skip
OF_MODEL = {"optimizer", "quantization"}  # no keywords


def run_file(values):
    build_config({**MINIMAL, **values}, Path())


def session(values):
    model = small_model(torch.float32)
    if kind := values.get("quantization"):
        model.model.layers[0].mlp.up_proj = Linear4bit(8, 8, quant_type=kind).to("cpu")
    optimizer = None if "optimizer" in values else SGD(model.parameters())
    Session(model, optimizer, **{name: value for name, value in values.items() if name not in OF_MODEL})


def refused(door, values):
    with pytest.raises(LengthwiseError) as raised:
        door(values)
    return str(raised.value).splitlines()


@pytest.mark.parametrize("rule", TABLE, ids=lambda rule: f"{rule.key}-{rule.beside}")
def test_what_does_not_go_together_is_refused_in_one_sentence_at_every_door(rule):
    values = {
        key: next(value for value in TRIED[key] if value in listed)
        for key, listed in ((rule.key, rule.refused), (rule.beside, rule.values))
    }
    for door, call in ((RUN_FILE, run_file), (SESSION, session)):
        if door in rule.doors:
            assert str(rule.error(values)) in refused(call, values)


def test_the_page_prints_the_table():
    def words(values):
        if values.are_others and values.listed == (None,):
            return "any"
        return "not " * values.are_others + ", ".join(f"`{plain(value)}`" for value in values.listed)

    lines = [
        f"| {', '.join(rule.doors)} | `{rule.key}` | {words(rule.refused)} | `{rule.beside}` | {words(rule.values)} "
        f"| {rule.instead}{f': {rule.why}' if rule.why else ''} |"
        for rule in TABLE
    ]
    assert "\n".join(lines) + "\n\n" in (DOCS / "run-file.md").read_text()


def test_keywords_for_editors_are_the_fields_of_the_record():
    fields, keywords = (get_type_hints(each) for each in (SessionKeywords, SessionOptions))
    fields = {name: fields[name] for name in SessionKeywords.model_fields}
    assert keywords.keys() == fields.keys()
    read = {"capacity_tokens", "planner", "offload", "device"}  # from wider types than the field's
    assert {name for name, hint in keywords.items() if hint != fields[name]} == read
    page = (DOCS / "session.md").read_text()
    for name, field in SessionKeywords.model_fields.items():
        assert f"`{name}`" in page
        assert f" {name}" in Session.__doc__.partition("Args:")[2], name
        assert field.description


def test_wrong_keywords_are_refused_together_in_a_run_files_words():
    wrong = {"shard": "zero4", "capacity_tokens": "8Q", "offload": {"store": "tape"}, "heads": 0, "stages": True}
    wrong |= {"recompute": "full"}
    odd = {"measurements": 5, "device": "gpu", "precision": "fp16", "gradient_checkpointing": True, "lr": 1e-3}
    odd |= {"offload_optimizer": "yes"}
    model = small_model(torch.float32)
    optimizer = SGD([*model.parameters()][:1])
    with pytest.raises(Problems) as raised:
        Session(model, optimizer, **wrong, **odd, capacity_token=64)
    found = {each.where: str(each) for each in raised.value.problems}
    with pytest.raises(Problems) as raised:
        run_file(wrong)
    for each in raised.value.problems:
        assert found[each.where] == str(each)
    assert "costs, or None" in found["measurements"]
    assert "offload_optimizer" in found
    lines = refused(session, {"seed": "x", "timeout_seconds": -1}) + refused(lambda _: Session(None, optimizer), {})
    assert [line.split()[1] for line in lines] == ["seed:", "timeout_seconds:", "model:"]
    assert "cuda:0" in found["device"]
    assert "unknown key -> `capacity_tokens`" in found["capacity_token"]
    assert "`recompute: layer`" in found["gradient_checkpointing"]
    assert "docs/session.md" in found["lr"], "a run file's key of a section is none of a session's"
    assert "optimizer" in found, "beside what is wrong with model and optimizer"


def test_a_misspelled_key_does_not_stand_for_one_that_is_there():
    for call in (run_file, session):
        lines = refused(call, {"shard": "zero3", "planner": "static", "planer": "static"})
        assert any("beside `shard: zero3`" in line for line in lines)
        assert any("planer" in line and "unknown key" in line for line in lines)


def test_keywords_are_read_as_those_of_a_run_file_and_numbers_of_numpy_as_whole():
    given = {"capacity_tokens": np.int64(64), "offload": {"store": "disk", "path": "x"}, "device": "cuda:1"}
    found = read_keywords(given)
    assert (found.capacity_tokens, type(found.capacity_tokens)) == (64, int)
    assert found.offload.path == Path("x").absolute()
    assert found.device == torch.device("cuda", 1)
    assert read_keywords({"capacity_tokens": "8K"}).capacity_tokens == 8192


def test_a_stored_model_and_a_section_are_checked_in_words(tmp_path):
    stored = StoredModel.of(str(write_model(tmp_path / "model")))
    with pytest.raises(LengthwiseError) as caught:
        Session(stored, {"name": "adamww", "rate": 1}, capacity=64)
    for words in ("optimizer.name", "adamw", "optimizer.rate", "capacity_tokens"):
        assert words in str(caught.value)
    model = small_model(torch.float32)
    with pytest.raises(LengthwiseError, match="values of a run file's optimizer"):
        Session(stored, SGD(model.parameters()), capacity_tokens=64)
