import mmap
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.stores import load, prepare, write_sources
from lengthwise.data.arrow import read_ahead
from lengthwise.engine.batch import StepBatch
from lengthwise.program import Segment

TOKENS = np.zeros(64 * mmap.PAGESIZE // 4, dtype="<i4")


@given(st.data())
def test_just_the_pages_of_a_view_are_asked_for(data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(TOKENS) - 1))
    last = data.draw(st.integers(first + 1, len(TOKENS)))
    with patch("lengthwise.data.arrow.advise") as advised:
        read_ahead(TOKENS[first:last])
    ((begin, count), _) = advised.call_args
    assert begin % mmap.PAGESIZE == 0
    assert 0 <= TOKENS.ctypes.data + 4 * first - begin < mmap.PAGESIZE
    assert begin + count == TOKENS.ctypes.data + 4 * last


def test_the_system_takes_what_is_asked_for_and_nothing_is_asked_of_no_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(bytes(3 * mmap.PAGESIZE))
    read_ahead(np.memmap(tmp_path / "tokens", dtype="<i4", mode="r")[5:1500])
    with patch("lengthwise.data.arrow.advise") as advised:
        read_ahead(TOKENS[5:5])
    assert not advised.called


def test_a_batch_asks_for_the_rows_of_its_segments_and_reads_none(tmp_path, monkeypatch):
    rows = [{"input_ids": [*range(10)]}, {"input_ids": [20, 21, 22], "labels": [-100, 21, 22]}]
    prepare(write_sources(tmp_path, [rows]), tmp_path / "store")
    batch, asked = StepBatch(load(tmp_path / "store"), [1, 0]), list[list[int]]()
    monkeypatch.setattr("lengthwise.data.arrow.read_ahead", lambda values: asked.append(values.tolist()))
    monkeypatch.setattr("lengthwise.data.arrow.row_digest", lambda *_row: pytest.fail("a row was read"))
    batch.read_ahead([Segment(sequence=0, start=1, stop=2), Segment(sequence=1, start=2, stop=4)])
    assert asked == [[20, 21, 22], [-100, 21, 22], [*range(10)]]
