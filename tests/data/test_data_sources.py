"""Files, folders, tables, datasets by name, the Python standard library: order, what is left out, what misbehaves."""

import errno
import gzip
import json.scanner
import os
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from data.stores import content, load, prepare
from data.stores import load as stored
from lengthwise.config import DataSource
from lengthwise.core.errors import DataError, Problems
from lengthwise.data import ByteTokenizer, load_dataset
from lengthwise.data.library import library
from lengthwise.data.sources import row_file


def texts_of(dataset):
    rows = range(dataset.num_rows)
    return [bytes(dataset.read(row, 0, int(dataset.lengths[row]))[0].tolist()) for row in rows]


def names(dataset):
    return [dataset.name(row) for row in range(dataset.num_rows)]


def write_files(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def test_folder_is_one_document_a_file_in_path_order_and_nothing_that_is_hidden_or_elsewhere(tmp_path):
    texts, others = ("a.txt", "a/b/c.py", "a/z.txt", "b.txt"), (".hidden", ".git/config")
    write_files(tmp_path / "texts", {name: f"{name}\r\n" for name in (*reversed(texts), *others)})
    write_files(tmp_path / "outside", {"secret": "x"})
    (tmp_path / "texts/link").symlink_to(tmp_path / "outside/secret")
    (tmp_path / "texts/folder").symlink_to(tmp_path / "outside")
    os.mkfifo(tmp_path / "texts/pipe")
    (tmp_path / "named").symlink_to(tmp_path / "texts")
    dataset = load(tmp_path / "named")
    assert tuple(names(dataset)) == texts
    assert texts_of(dataset) == [f"{name}\r\n".encode() for name in texts]


def test_folder_of_rows_is_its_files_in_order(tmp_path):
    folder = tmp_path / "shards"
    rows = {"b/0.jsonl": '{"text": "c"}\n', "a-1.jsonl.gz": gzip.compress(b'{"text": "b"}\n')}
    write_files(folder, {**rows, "a-0.jsonl": '{"text": "a"}\n{"text": "aa"}\n', "README.md": "# Shards"})
    dataset = load(folder)
    assert names(dataset) == ["shards/a-0.jsonl:1", "shards/a-0.jsonl:2", "shards/a-1.jsonl.gz:1", "shards/b/0.jsonl:1"]
    assert texts_of(dataset) == [b"a", b"aa", b"b", b"c"]


ROW, README = '{"text": "a"}\n', {"README.md": "# Data"}


@pytest.mark.parametrize(
    ("files", "named", "said"),
    [
        ({}, "", "a folder without any"),
        ({"shard.jsonl": ROW, "notes.txt": "b"}, "", r"shard\.jsonl.*1 other \(notes\.txt\).*source of its own"),
        ({"a.json": '[{"text": "a"}]', **README}, "", r"a\.json: .*rows of JSON.*source of its own"),
        ({"a.json": '[\n  {\n    "id": "1",\n    "conversations": []\n  }\n]', **README}, "", "rows of JSON"),
        ({"a.json": '{"input_ids": [1]}\n{"input_ids": [2]}\n', **README}, "", "rows of JSON"),
        ({"\udcff": b"\xfe"}, "", r"\\udcff"),
        ({}, "pipe", "a regular file; got something else"),
        ({"$LENGTHWISE_NAME.jsonl": ROW, "other.jsonl": ROW}, "$LENGTHWISE_NAME.jsonl", "a path without ::"),
        ({"a::b.jsonl": ROW}, "a::b.jsonl", "a path without :: and names of variables"),
        ({"shifted.csv": "text,id\na,b,c\n"}, "shifted.csv", "names that differ"),
        ({"lost.csv": "text,text\na,b\n"}, "lost.csv", "names that differ"),
    ],
)
def test_files_that_are_no_rows_and_no_texts_are_refused(tmp_path, monkeypatch, files, named, said):
    monkeypatch.setenv("LENGTHWISE_NAME", "other")
    write_files(tmp_path, files)
    if named == "pipe":
        os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=said):
        load(tmp_path / named)


def test_csv_may_have_a_byte_order_mark_and_a_long_header(tmp_path):
    header = ",".join(["text", *map(str, range(2000))])
    write_files(tmp_path, {"train.csv": f"\ufeff{header}\n" + ",".join(["a"] * 2001) + "\n"})
    assert load(tmp_path / "train.csv").num_rows == 1


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
    path.write_text('{"text": "abc"}\n{"text": ""}\n{"text": 1}\n')
    with pytest.raises(Problems) as caught:  # no leave for empty and long ones
        load(DataSource(path=path, bad_rows="skip", max_tokens=2))
    assert [each.where.rpartition(":")[2] for each in caught.value.problems] == ["1", "2"]


def test_folder_bad_and_empty_files_come_together_or_are_left_out(tmp_path):
    write_files(tmp_path, {"a": b"ok\x80", "b": b"", "c": b"fine"})
    with pytest.raises(Problems) as caught:
        load(DataSource(path=tmp_path))
    first, second = caught.value.problems
    assert first.where == str(tmp_path / "a")
    assert "byte offset 2" in first.got
    assert (second.where, second.got) == (str(tmp_path / "b"), "an empty file")
    dataset = load(DataSource(path=tmp_path, bad_rows="skip", empty="skip"))
    assert dataset.ids.tolist() == [2]
    assert dataset.skipped == {"bad": 1, "empty": 1}


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


def test_sources_number_their_rows_one_after_another(tmp_path):
    write_files(tmp_path, {"texts/a": "aaa", "rows.jsonl": '{"text": "b"}\n{"text": "cc"}\n'})
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
    assert texts_of(dataset)[found.index("json/scanner.py")] == Path(json.scanner.__file__).read_bytes()


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


OF_KINDS = {
    "text": [{"text": text} for text in ("a", "é\n\0", "長" * 9)],
    "labels": [
        {"input_ids": [number] * n, "labels": [-100, *[number] * (n - 1)]} for number, n in enumerate((1, 2, 7, 4))
    ],
    "pair": [{"prompt": "", "completion": "abé"}, {"prompt": "é", "completion": "b"}],
}


def load_table(path, **keys):
    return load_dataset([DataSource(path=path, **keys)], tokenizer=ByteTokenizer, vocab_size=300)


def write(rows, path, kind):
    if kind in ("jsonl", "gzip", "zstd"):
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        packed = {"jsonl": lines, "gzip": gzip.compress(lines), "zstd": pa.compress(lines, "zstd", asbytes=True)}
        path.write_bytes(packed[kind])
        return path
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=3)
        return path
    make = pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    if kind != "saved":
        return path
    folder = path.parent / f"{path.name}-saved"
    datasets.Dataset.from_file(str(path)).save_to_disk(folder)
    return folder


@pytest.mark.parametrize("kind", ["gzip", "zstd", "parquet", "arrow file", "arrow stream", "saved"])
def test_source_of_every_kind_is_the_same_rows_as_json_lines_and_is_prepared(tmp_path, kind):
    for name, rows in OF_KINDS.items():
        lines = DataSource(path=write(rows, tmp_path / f"{name}.jsonl", "jsonl"))
        source = DataSource(path=write(rows, tmp_path / name, kind))
        expected, found = content(stored(lines)), content(stored(source))
        for key in ("digest", "rows", "losses"):
            assert found[key] == expected[key], (name, key)
    prepare([source], tmp_path / "store")
    assert content(stored(tmp_path / "store")) == found
    bad = DataSource(path=write([{"input_ids": [1]}] * 99 + [{"input_ids": [100]}], tmp_path / "bad", kind))
    with pytest.raises(DataError, match=r":100: expected whole numbers from 0 to 99"):
        prepare([bad], tmp_path / "other", vocab_size=100)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input_ids": [1.0]}, r"whole numbers; got input_ids\[0\] = 1\.0"),
        ({"input_ids": [float("nan")]}, r"input_ids\[0\] = NaN"),
        ({"input_ids": [1, None]}, r"input_ids\[1\] = null"),
        ({"text": b"abc"}, '"text" to be a string'),
        ({"text": None, "n": 1}, "got null"),
        ({"input_ids": []}, "empty"),
    ],
    ids=str,
)
def test_table_bad_row_is_refused(tmp_path, row, said):
    path = write([row], tmp_path / "t", "parquet")
    with pytest.raises(DataError, match=said) as caught:
        load_table(path)
    assert caught.value.where == f"{path}:1"


def test_table_without_rows_or_of_text_that_is_no_utf8_is_refused(tmp_path):
    no_text = pa.array([b"ok", b"ab\xff"], type=pa.binary()).view(pa.string())
    for text, said in ((pa.array([], type=pa.string()), "expected rows"), (no_text, r"UnicodeDecodeError.* byte 0xff")):
        parquet.write_table(pa.table({"text": text}), tmp_path / "t")
        with pytest.raises(DataError, match=said) as caught:
            load_table(tmp_path / "t")
    assert caught.value.where == f"{tmp_path / 't'}, from row 1 on"


@pytest.mark.parametrize("kind", ["gzip", "parquet", "arrow stream"])
def test_file_cut_short_is_refused(tmp_path, kind):
    path = write([{"input_ids": list(range(99))}] * 200, tmp_path / "t", kind)
    path.write_bytes(path.read_bytes()[:-20] if kind != "arrow stream" else path.read_bytes()[:-500])
    with pytest.raises(DataError, match="a whole file"):
        load_table(path)


def test_a_file_of_zstandard_that_is_cut_far_behind_its_begin_is_refused(tmp_path):
    """Its own library gives what it has of such a file, without an error."""
    packed = pa.compress(b"".join(b'{"text": "%s"}\n' % os.urandom(64).hex().encode() for _ in range(9999)), "zstd")
    (tmp_path / "rows.zst").write_bytes(packed.to_pybytes()[:-9000])
    with pytest.raises(DataError, match="a whole file"):
        load_table(tmp_path / "rows.zst")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"dataset_dict.json": "{}"}, "one split of a saved dataset"),
        ({"state.json": "{"}, "a saved dataset"),
        ({"state.json": '{"_data_files": []}'}, "expected rows; got an empty file"),
        ({"state.json": '{"_data_files": [{"filename": "../x.arrow"}]}'}, "in its folder"),
        ({"state.json": '{"_data_files": [{"filename": "x.arrow"}]}'}, "a whole file"),
    ],
)
def test_saved_dataset_that_is_not_whole_is_refused(tmp_path, files, said):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said):
        load_table(tmp_path)


def test_errors_that_the_library_wraps_are_told_as_they_are():
    with pytest.raises(KeyboardInterrupt), library("a", "file"):
        raise datasets.exceptions.DatasetGenerationError from KeyboardInterrupt()
    with pytest.raises(DataError, match="expected room for a copy of a "), library("a", "file"):
        raise OSError(errno.EFBIG, "File too large")
