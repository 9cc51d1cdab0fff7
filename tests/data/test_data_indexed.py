"""Megatron's indexed datasets: files written here by hand from the format, byte for byte, and files that are wrong."""

import struct
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.stores import content, load, prepare
from lengthwise.config import DataSource
from lengthwise.core.errors import DataError, LengthwiseError
from run.small_runs import call, make_rows, write_rows

KINDS = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "H": 8}  # by struct's letters


def write_indexed(prefix, documents, *, letter="i", version=1, code=None, modes=b"", magic=b"MMIDIDX\x00\x00"):
    """Write documents, each a list of sequences, each a list of ids."""
    sequences = [sequence for document in documents for sequence in document]
    size = struct.calcsize(f"<{letter}")
    index = magic + struct.pack("<Q", version) + struct.pack("<B", KINDS[letter] if code is None else code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents) + 1)
    index += b"".join(struct.pack("<i", len(each)) for each in sequences)
    place = 0
    for each in sequences:
        index += struct.pack("<q", place)
        place += len(each) * size
    ended = 0
    index += struct.pack("<q", 0)
    for document in documents:
        ended += len(document)
        index += struct.pack("<q", ended)
    prefix.with_name(prefix.name + ".idx").write_bytes(index + modes)
    data = b"".join(struct.pack(f"<{len(each)}{letter}", *each) for each in sequences)
    prefix.with_name(prefix.name + ".bin").write_bytes(data)
    return prefix


def refused(path, **settings):
    with pytest.raises(LengthwiseError) as caught:
        load(DataSource(path=path, **settings))
    assert "Traceback" not in str(caught.value)
    return str(caught.value)


def patched(path, offset, values):
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(values)] = values
    path.write_bytes(raw)


def test_indexed_of_known_bytes(tmp_path):
    index = (
        "4d4d494449445800 00 0100000000000000 08 0300000000000000 0300000000000000"  # magic, version, uint16, 3, 2 + 1
        "02000000 01000000 03000000"  # lengths
        "0000000000000000 0400000000000000 0600000000000000"  # where they start, in bytes
        "0000000000000000 0200000000000000 0300000000000000"  # the first two are one document
    )
    (tmp_path / "a_document.idx").write_bytes(bytes.fromhex(index.replace(" ", "")))
    (tmp_path / "a_document.bin").write_bytes(bytes.fromhex("0100 0200 ff00 0400 0500 0600".replace(" ", "")))
    found = content(load(tmp_path / "a_document"))
    assert [row[0] for row in found["rows"]] == [[1, 2, 255], [4, 5, 6]]
    assert found["losses"] == [2, 2]
    assert found["names"] == [f"{tmp_path}/a_document:1", f"{tmp_path}/a_document:2"]


@pytest.mark.parametrize(("letter", "ending"), [*zip(KINDS, ["", ".idx", ".bin"] * 2, strict=True)])
def test_indexed_of_every_kind_is_its_rows_of_ids(tmp_path, letter, ending):
    documents = [[[1, 2, 3]], [[4], [5, 6]], [[7] * 40, [127]]]
    rows = [{"input_ids": [*chain(*document)]} for document in documents]
    write_indexed(tmp_path / "corpus.v1", documents, letter=letter)
    plain = content(load(write_rows(tmp_path / "rows.jsonl", rows)))
    indexed = load(tmp_path / f"corpus.v1{ending}")
    assert {**content(indexed), "names": plain["names"]} == plain
    assert indexed.read(1, 1, 3)[0].tolist() == [5, 6]
    assert indexed.read(1, 1, 3)[0].dtype == np.int32
    assert not indexed.read(1, 1, 3)[1].flags.writeable


@given(documents=st.lists(st.lists(st.lists(st.integers(0, 255), max_size=9), max_size=4), min_size=1, max_size=9))
def test_indexed_of_any_documents_is_its_rows_of_ids(tmp_path_factory, documents):
    folder = tmp_path_factory.mktemp("data")
    documents = [[[1]], *documents]
    prefix = write_indexed(folder / "data", documents, letter="H")
    rows = write_rows(folder / "rows.jsonl", [{"input_ids": [*chain(*each)]} for each in documents])
    settings = {"empty": "skip", "max_tokens": 20, "too_long": "skip"}
    plain = content(load(DataSource(path=rows, **settings)))
    assert {**content(load(DataSource(path=prefix, **settings))), "names": plain["names"]} == plain


def test_indexed_beside_other_sources_keeps_order_and_weight(tmp_path):
    prefix = write_indexed(tmp_path / "data", [[[1]], [[2, 3]]])
    rows = write_rows(tmp_path / "rows.jsonl", make_rows([4]))
    both = load(DataSource(path=rows), DataSource(path=prefix, weight=0.5), DataSource(path=rows))
    assert both.lengths.tolist() == [4, 1, 2, 4]
    assert both.weights == ((0, 1.0), (1, 0.5), (3, 1.0))
    assert both.source_key(2) == "data.1"


@pytest.mark.parametrize(
    ("offset", "values", "message"),
    [
        (0, b"TNTIDX\0\0", 'begins with "MMIDIDX"'),
        (9, b"\2", "expected version 1; got version 2"),
        (17, b"\6", r"kind 6 (float64)"),
        (17, b"\7", r"kind 7 (float32)"),
        (17, b"\0", "got kind 0"),
        (17, b"\5", "expected 56 bytes, as its index says; got 28"),
        (18, b"\4", "expected 106 bytes, as its 4 sequences and 3 entries"),
        (26, b"\xff" * 8, "entries of documents take; got"),
        (34, b"\xff\xff\xff\xff", "expected lengths of 0 or more; got -1"),
        (34, b"\1", "sequence 2 at byte 8 of the .bin, not where the one before it ends"),
        (46, b"\4", "sequence 1 at byte 4 of the .bin"),
        (70, b"\1", "documents that take sequences 0 to 3; got entries from 1 to 3"),
        (78, b"\7", "entries from 0 to 3, not ascending"),
        (86, b"\2", "entries from 0 to 2"),
    ],
)
def test_indexed_with_a_wrong_index_is_refused_by_name(tmp_path, offset, values, message):
    prefix = write_indexed(tmp_path / "data", [[[1, 2], [3]], [[4, 5, 6, 7]]])
    if values == b"\5":  # as many ids of eight bytes: pointers of these
        write_indexed(tmp_path / "data", [[[1, 2], [3]], [[4, 5, 6, 7]]], letter="q")
        (tmp_path / "data.bin").write_bytes(b"\0" * 28)
    else:
        patched(tmp_path / "data.idx", offset, values)
    text = refused(prefix)
    assert message in text
    assert str(tmp_path / "data.") in text


@pytest.mark.parametrize("kept", [0, 33, 34, 93])
def test_indexed_that_is_cut_is_refused_by_name(tmp_path, kept):
    prefix = write_indexed(tmp_path / "data", [[[1, 2], [3]], [[4, 5, 6, 7]]])
    whole = (tmp_path / "data.idx").read_bytes()
    assert len(whole) == 94
    (tmp_path / "data.idx").write_bytes(whole[:kept])
    assert f"{tmp_path}/data.idx: expected" in refused(prefix)
    (tmp_path / "data.idx").write_bytes(whole + b"\0\0")
    assert "got 96" in refused(prefix)


def test_indexed_whose_ids_are_cut_or_more_or_not_there_is_refused(tmp_path):
    prefix = write_indexed(tmp_path / "data", [[[1, 2], [3]]])
    for raw in (b"\1\0\0\0" * 2, b"\1\0\0\0" * 4, b""):
        (tmp_path / "data.bin").write_bytes(raw)
        assert f"{tmp_path}/data.bin: expected 12 bytes, as its index says; got {len(raw)}" in refused(prefix)
    (tmp_path / "data.bin").unlink()
    assert "An indexed dataset is two files, NAME.idx and NAME.bin" in refused(prefix)
    write_indexed(tmp_path / "data", [[[1]]])
    (tmp_path / "data.idx").unlink()
    for path in (prefix, tmp_path / "data.bin"):
        assert f"{tmp_path}/data.idx: expected a regular file; got nothing there" in refused(path)


def test_indexed_of_modes_or_of_no_documents_is_refused(tmp_path):
    modes = write_indexed(tmp_path / "modes", [[[1, 2], [3]]], modes=b"\0\1")
    assert "multimodal data is not trained on yet" in refused(modes)
    assert "expected sequences; got none" in refused(write_indexed(tmp_path / "data", []))
    assert "at least one sequence to train on" in refused(write_indexed(tmp_path / "empty", [[[]]]), empty="skip")


@pytest.mark.parametrize(("letter", "bad"), [("i", 256), ("q", 2**31), ("b", -5)])
def test_indexed_ids_that_the_model_does_not_have_are_named_or_left_out(tmp_path, letter, bad):
    prefix = write_indexed(tmp_path / "data", [[[1, 2]], [[3], [4, bad, bad]], [[5]]], letter=letter)
    text = refused(prefix)
    assert f"{prefix}:2: expected ids from 0 to 255; got id {bad} at token 3" in text
    assert text.count("expected") == 1
    for limits in ({}, {"max_tokens": 2, "too_long": "skip"}):
        kept = load(DataSource(path=prefix, bad_rows="skip", **limits))
        assert kept.lengths.tolist() == [2, 0, 1]
        assert kept.skipped == {"bad": 1}


def test_indexed_empty_and_long_documents_stop_the_run_or_are_left_out(tmp_path):
    prefix = write_indexed(tmp_path / "data", [[[1, 2]], [], [[]], [[3] * 9]])
    text = refused(prefix, max_tokens=5)
    assert f"{prefix}:2: expected a row with tokens; got an empty document (and in 1 more rows)" in text
    assert f"{prefix}:4: expected at most max_tokens 5; got 9 tokens" in text
    kept = load(DataSource(path=prefix, empty="skip", max_tokens=5, too_long="skip"))
    assert (kept.lengths.tolist(), kept.skipped) == ([2, 0, 0, 0], {"empty": 2, "too long": 1})


def test_indexed_is_data_to_look_at(tmp_path, capsys):
    write_indexed(tmp_path / "data", [[[1, 2]], [[3]]], letter="H")
    assert call("data", tmp_path / "data") == 0
    assert "2 sequences" in capsys.readouterr().out


def test_indexed_is_prepared_in_parts_as_any_source(tmp_path):
    documents = [[[number % 256] * (number % 37)] for number in range(60)]
    source = DataSource(path=write_indexed(tmp_path / "data", documents, letter="H"), empty="skip")
    prepare([source], tmp_path / "store")
    assert content(load(tmp_path / "store")) == content(load(source))
    assert len(list((tmp_path / "store").glob("rows-*.arrow"))) > 3
    other = DataSource(path=write_indexed(tmp_path / "bad", [[[1] * 300], [[300]]], letter="H"))
    made, _ = prepare([other], tmp_path / "other")
    assert made.largest_id == 300
    with pytest.raises(DataError, match=rf"{tmp_path}/bad:2: expected ids from 0 to 255"):
        prepare([other], tmp_path / "third", vocab_size=256)


def test_a_folder_of_indexed_datasets_asks_for_a_source_each(tmp_path):
    (tmp_path / "folder").mkdir()
    write_indexed(tmp_path / "folder/a", [[[1]]])
    write_indexed(tmp_path / "folder/b", [[[1]]])
    text = refused(tmp_path / "folder")
    assert "2 indexed datasets (a.idx)" in text
    assert text.count("expected") == 1
