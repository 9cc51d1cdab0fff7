import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.stores import load, prepare, write_sources
from lengthwise.data.ahead import read_ahead
from lengthwise.engine.batch import StepBatch
from lengthwise.program import Segment

PAGES = 64


class NotedMap(mmap.mmap):
    """A mapped file that notes what it is advised of: (advice, first byte, bytes)."""

    def madvise(self, *arguments: int) -> None:
        """Note it, and pass it on."""
        self.__dict__.setdefault("advised", []).append(arguments)
        super().madvise(*arguments)


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> tuple[NotedMap, np.ndarray]:
    path = tmp_path_factory.mktemp("ahead") / "tokens.bin"
    path.write_bytes(bytes(PAGES * mmap.PAGESIZE))
    with path.open("rb") as file:
        found = NotedMap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return found, np.ndarray(PAGES * mmap.PAGESIZE // 4, dtype="<i4", buffer=found)


@given(st.data())
def test_just_the_pages_of_a_view_are_asked_for(mapped: tuple[NotedMap, np.ndarray], data: st.DataObject) -> None:
    file, tokens = mapped
    first = data.draw(st.integers(0, len(tokens) - 1))
    last = data.draw(st.integers(first + 1, len(tokens)))
    start = data.draw(st.integers(0, last - first - 1))
    file.__dict__["advised"] = []
    read_ahead(tokens[first:last][start:])
    [(advice, begin, count)] = file.__dict__["advised"]
    assert advice == mmap.MADV_WILLNEED
    assert begin == 4 * (first + start) // mmap.PAGESIZE * mmap.PAGESIZE
    assert begin + count == 4 * last


def test_nothing_is_asked_for_of_memory_or_of_no_tokens(mapped: tuple[NotedMap, np.ndarray]) -> None:
    file, tokens = mapped
    file.__dict__["advised"] = []
    read_ahead(tokens[5:5])
    read_ahead(np.arange(4))
    read_ahead(np.arange(4)[1:])
    assert file.__dict__["advised"] == []


def test_a_batch_asks_for_the_rows_of_its_segments_and_reads_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"input_ids": [*range(10)]}, {"input_ids": [20, 21, 22], "labels": [-100, 21, 22]}]
    prepare(write_sources(tmp_path, [rows]), tmp_path / "store")
    batch, asked = StepBatch(load(tmp_path / "store"), [1, 0]), list[list[int]]()
    monkeypatch.setattr("lengthwise.data.store.read_ahead", lambda values: asked.append(values.tolist()))
    monkeypatch.setattr("lengthwise.data.store.row_digest", lambda *_row: pytest.fail("a row was read"))
    batch.read_ahead([Segment(sequence=0, start=1, stop=2), Segment(sequence=1, start=2, stop=4)])
    assert asked == [[20, 21, 22], [-100, 21, 22], [*range(10)], [*range(10)]]
