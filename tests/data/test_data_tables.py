"""Tables and packed files: the rows of each kind of source are those of the same rows in JSON lines."""

import errno
import gzip
import json
import os

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from data.stores import content, prepare
from data.stores import load as stored
from lengthwise.config import DataSource
from lengthwise.core.errors import DataError
from lengthwise.data import ByteTokenizer, load_dataset
from lengthwise.data.library import library

ROWS = {
    "text": [{"text": text} for text in ("a", "é\n\0", "長" * 9)],
    "labels": [
        {"input_ids": [number] * n, "labels": [-100, *[number] * (n - 1)]} for number, n in enumerate((1, 2, 7, 4))
    ],
    "pair": [{"prompt": "", "completion": "abé"}, {"prompt": "é", "completion": "b"}],
}


def load(path, **keys):
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
    for name, rows in ROWS.items():
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
        load(path)
    assert caught.value.where == f"{path}:1"


def test_table_without_rows_or_of_text_that_is_no_utf8_is_refused(tmp_path):
    no_text = pa.array([b"ok", b"ab\xff"], type=pa.binary()).view(pa.string())
    for text, said in ((pa.array([], type=pa.string()), "expected rows"), (no_text, r"UnicodeDecodeError.* byte 0xff")):
        parquet.write_table(pa.table({"text": text}), tmp_path / "t")
        with pytest.raises(DataError, match=said) as caught:
            load(tmp_path / "t")
    assert caught.value.where == f"{tmp_path / 't'}, from row 1 on"


@pytest.mark.parametrize("kind", ["gzip", "parquet", "arrow stream"])
def test_file_cut_short_is_refused(tmp_path, kind):
    path = write([{"input_ids": list(range(99))}] * 200, tmp_path / "t", kind)
    path.write_bytes(path.read_bytes()[:-20] if kind != "arrow stream" else path.read_bytes()[:-500])
    with pytest.raises(DataError, match="a whole file"):
        load(path)


def test_a_file_of_zstandard_that_is_cut_far_behind_its_begin_is_refused(tmp_path):
    """Its own library gives what it has of such a file, without an error."""
    packed = pa.compress(b"".join(b'{"text": "%s"}\n' % os.urandom(64).hex().encode() for _ in range(9999)), "zstd")
    (tmp_path / "rows.zst").write_bytes(packed.to_pybytes()[:-9000])
    with pytest.raises(DataError, match="a whole file"):
        load(tmp_path / "rows.zst")


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
        load(tmp_path)


def test_errors_that_the_library_wraps_are_told_as_they_are():
    with pytest.raises(KeyboardInterrupt), library("a", "file"):
        raise datasets.exceptions.DatasetGenerationError from KeyboardInterrupt()
    with pytest.raises(DataError, match="expected room for a copy of a "), library("a", "file"):
        raise OSError(errno.EFBIG, "File too large")
