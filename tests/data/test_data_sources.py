"""Folders of text files and the Python standard library: order, what is left out, files that misbehave."""

import gzip
import json.scanner
import os
from pathlib import Path

import pytest

from data.stores import prepare
from lengthwise.config import DataSource
from lengthwise.core.errors import DataError, Problems
from lengthwise.data import ByteTokenizer, load_dataset
from lengthwise.data.sources import row_file


def tokens_of(dataset, row):
    return dataset.read(row, 0, int(dataset.lengths[row]))[0]


def load(*sources, tokenizer=ByteTokenizer):
    return load_dataset(sources, tokenizer=tokenizer, vocab_size=None)


def names(dataset):
    return [dataset.name(row) for row in range(dataset.num_rows)]


def test_folder_is_one_document_a_file_in_path_order(tmp_path):
    for name in ("b.txt", "a/z.txt", "a.txt", "a/b/c.py", ".hidden", ".git/config"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() + b"\r\n")
    dataset = load(DataSource(path=tmp_path))
    assert names(dataset) == ["a.txt", "a/b/c.py", "a/z.txt", "b.txt"]
    assert bytes(tokens_of(dataset, 1).tolist()) == b"a/b/c.py\r\n"


def test_folder_of_rows_beside_texts_is_taken_for_neither(tmp_path):
    (tmp_path / "shard.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "notes.txt").write_text("b")
    with pytest.raises(DataError, match=r"shard\.jsonl.*1 other \(notes\.txt\).*source of its own"):
        load(DataSource(path=tmp_path))


def test_folder_of_rows_is_its_files_in_order(tmp_path):
    folder = tmp_path / "shards"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "0.jsonl").write_text('{"text": "c"}\n')
    (folder / "a-1.jsonl.gz").write_bytes(gzip.compress(b'{"text": "b"}\n'))
    (folder / "a-0.jsonl").write_text('{"text": "a"}\n{"text": "aa"}\n')
    (folder / "README.md").write_text("# Shards")
    dataset = load(DataSource(path=folder))
    assert names(dataset) == ["shards/a-0.jsonl:1", "shards/a-0.jsonl:2", "shards/a-1.jsonl.gz:1", "shards/b/0.jsonl:1"]
    assert [bytes(tokens_of(dataset, row).tolist()) for row in range(4)] == [b"a", b"aa", b"b", b"c"]


@pytest.mark.parametrize("prepared", [False, True])
def test_bad_rows_are_left_out_and_counted_only_when_told(tmp_path, prepared):
    path = tmp_path / "rows.jsonl"
    rows = b'{"text": "a"}\n{"text": 3}\n{"txt": "a"}\n\xff\n{"text": "\\ud800"}\n{"text": "b"}\n{"te'
    path.write_bytes(b"oops\n" + rows)
    with pytest.raises(Problems, match="cut off"):
        load(DataSource(path=path))
    source, told = DataSource(path=path, bad_rows="skip"), []
    plain = load_dataset([source], tokenizer=ByteTokenizer, vocab_size=None, on_bad_row=told.append)
    assert [each.where.rpartition(":")[2] for each in told] == ["1", "3", "4", "5", "6", "8"]
    if prepared:
        prepare([source], tmp_path / "store")
        plain = load(DataSource(path=tmp_path / "store"))
    assert plain.lengths.tolist() == [0, 1, 0, 0, 0, 0, 1, 0]
    assert plain.skipped == {"bad": 6}
    assert plain.name(6) == "rows.jsonl:7"


def test_bad_rows_skipped_are_no_leave_for_empty_and_long_ones(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "abc"}\n{"text": ""}\n{"text": 1}\n')
    with pytest.raises(Problems) as caught:
        load(DataSource(path=path, bad_rows="skip", max_tokens=2))
    assert [each.where.rpartition(":")[2] for each in caught.value.problems] == ["1", "2"]


@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "a"}]',
        '[\n  {\n    "id": "1",\n    "conversations": []\n  }\n]',
        '{"input_ids": [1]}\n{"input_ids": [2]}\n',
    ],
)
def test_folder_of_rows_in_a_json_file_is_not_taken_for_text(tmp_path, content):
    (tmp_path / "train.json").write_text(content)
    (tmp_path / "README.md").write_text("# Data")
    with pytest.raises(DataError, match=r"train\.json: .*rows of JSON.*source of its own"):
        load(DataSource(path=tmp_path))


def test_folder_links_are_left_out_but_the_named_folder_may_be_one(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("x")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a").write_text("a")
    (tmp_path / "texts" / "link").symlink_to(tmp_path / "outside" / "secret")
    (tmp_path / "texts" / "folder").symlink_to(tmp_path / "outside")
    (tmp_path / "named").symlink_to(tmp_path / "texts")
    assert names(load(DataSource(path=tmp_path / "named"))) == ["a"]


def test_folder_pipes_are_left_out_and_a_named_one_is_refused(tmp_path):
    (tmp_path / "a").write_text("a")
    os.mkfifo(tmp_path / "pipe")
    assert names(load(DataSource(path=tmp_path))) == ["a"]
    with pytest.raises(DataError, match="a regular file; got something else"):
        load(DataSource(path=tmp_path / "pipe"))


def test_folder_bad_and_empty_files_come_together_or_are_left_out(tmp_path):
    with pytest.raises(DataError, match="a folder without any"):
        load(DataSource(path=tmp_path))
    for name, raw in (("a", b"ok\x80"), ("b", b""), ("c", b"fine")):
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(Problems) as caught:
        load(DataSource(path=tmp_path))
    first, second = caught.value.problems
    assert first.where == str(tmp_path / "a")
    assert "byte offset 2" in first.got
    assert (second.where, second.got) == (str(tmp_path / "b"), "an empty file")
    dataset = load(DataSource(path=tmp_path, bad_rows="skip", empty="skip"))
    assert dataset.ids.tolist() == [2]
    assert dataset.skipped == {"bad": 1, "empty": 1}


def test_folder_file_name_that_is_no_utf8_can_be_told(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff"
    with open(path, "wb") as file:
        file.write(b"\xfe")
    with pytest.raises(DataError, match=r"\\udcff"):
        load(DataSource(path=tmp_path))


@pytest.mark.parametrize("name", ["$LENGTHWISE_NAME.jsonl", "a::b.jsonl"])
def test_file_of_rows_whose_name_the_library_would_change_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setenv("LENGTHWISE_NAME", "other")
    for each in (name, "other.jsonl"):
        (tmp_path / each).write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match="a path without :: and names of variables"):
        load(DataSource(path=tmp_path / name))


def test_file_without_permission_is_refused(tmp_path, monkeypatch):
    def refuse(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a").write_text("x")
    monkeypatch.setattr(Path, "open", refuse)  # root, who may run the tests, reads everything
    with pytest.raises(DataError, match="Permission denied") as caught:
        load(DataSource(path=tmp_path))
    assert caught.value.where == str(tmp_path / "a")


@pytest.mark.parametrize("change", ["append", "replace"])
def test_file_that_changes_while_read_is_refused(tmp_path, change):
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')

    def tokenizer():  # asked for at the first text, while the file is open
        if change == "append":
            with path.open("a") as file:
                file.write('{"text": "c"}\n')
        else:
            (tmp_path / "other").write_text(path.read_text())
            (tmp_path / "other").replace(path)
        return ByteTokenizer()

    with pytest.raises(DataError) as caught:
        load(DataSource(path=path), tokenizer=tokenizer)
    assert caught.value.where == str(path)
    assert "a change" in str(caught.value)


def test_replaced_file_of_the_same_time_is_copied_anew(tmp_path):
    path, found = tmp_path / "train.jsonl", []
    for text in ("old", "new"):
        (tmp_path / text).write_text(f'{{"text": "{text}"}}\n')
        os.utime(tmp_path / text, (10**9, 10**9))
        (tmp_path / text).replace(path)
        found += row_file(path, "train").open(stream=False)["text"]
    assert found == ['{"text": "old"}\n', '{"text": "new"}\n']


@pytest.mark.parametrize("content", ["text,id\na,b,c\n", "text,text\na,b\n"], ids=["shifted", "lost"])
def test_csv_whose_fields_have_no_names_of_their_own_is_refused(tmp_path, content):
    path = tmp_path / "train.csv"
    path.write_text(content)
    with pytest.raises(DataError, match="names that differ"):
        load(DataSource(path=path))


def test_sources_number_their_rows_one_after_another(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a").write_text("aaa")
    (tmp_path / "rows.jsonl").write_text('{"text": "b"}\n{"text": "cc"}\n')
    dataset = load(
        DataSource(path=tmp_path / "rows.jsonl"),
        DataSource(path=tmp_path / "texts"),
        DataSource(path=tmp_path / "rows.jsonl", max_tokens=1, too_long="skip"),
    )
    assert names(dataset) == ["rows.jsonl:1", "rows.jsonl:2", "a", "rows.jsonl:1", "rows.jsonl:2"]
    assert dataset.ids.tolist() == [0, 1, 2, 3]
    assert [dataset.source_key(row) for row in (1, 2, 4)] == ["data.0", "data.1", "data.2"]


def test_stdlib_is_the_library_without_its_tests():
    dataset = load(DataSource(python_stdlib=True, max_tokens=8192, too_long="skip"))
    found = names(dataset)
    assert found == sorted(found)
    assert {"ast.py", "json/decoder.py", "unittest/case.py", "pydoc_data/topics.py"} <= set(found)
    assert not {part for name in found for part in name.split("/")} & {"test", "tests", "idle_test", "site-packages"}
    assert all(name.endswith(".py") for name in found)
    assert 300 < len(dataset.ids) == dataset.num_rows - dataset.skipped["too long"] - dataset.skipped["empty"]
    assert dataset.lengths.max() <= 8192
    row = found.index("json/scanner.py")
    assert bytes(tokens_of(dataset, row).tolist()) == Path(json.scanner.__file__).read_bytes()


def test_csv_may_have_a_byte_order_mark_and_a_long_header(tmp_path):
    path, header = tmp_path / "train.csv", ",".join(["text", *map(str, range(2000))])
    path.write_text(f"\ufeff{header}\n" + ",".join(["a"] * 2001) + "\n", encoding="utf-8")
    assert load(DataSource(path=path)).num_rows == 1
