"""Datasets by name, as the `datasets` library finds them without a network: a folder of that name."""

import pytest

from data.stores import content, load
from lengthwise.config import DataSource
from lengthwise.core.errors import DataError


def source(**keys):
    return DataSource.model_validate({"dataset": "org/name", "split": "train", **keys})


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_dataset_has_the_rows_of_its_split(hub, split):
    found = load(source(split=split))
    assert content(found)["rows"] == content(load(hub / f"{split}.jsonl"))["rows"]
    assert found.name(1) == f"org/name:{split}:2"


def test_a_dataset_may_be_files_of_a_kind(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text(f"text,id\n{name},1\n")
    found = load(source(dataset="csv", data_files=[str(tmp_path / "*.csv")]))
    assert [found.read(row, 0, 9)[0].tolist() for row in found.ids] == [[97], [98]]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"split": "nope"}, "org/name:nope: expected a dataset that `datasets` can load; got .*nope"),
        ({"subset": "other"}, "org/name:other:train: .*other"),
        ({"dataset": "nobody/nothing"}, "nobody/nothing:train: .*reach the hub once"),
    ],
)
def test_what_the_library_does_not_find_is_told_in_its_words(hub, keys, told):
    with pytest.raises(DataError, match=told):
        load(source(**keys))
