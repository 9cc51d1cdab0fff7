import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.data.ahead import read_ahead
from lengthwise.data.dataset import DatasetBuilder
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


def test_a_batch_asks_for_its_segments_and_the_token_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[list[int]]()
    monkeypatch.setattr("lengthwise.engine.batch.read_ahead", lambda values: asked.append(values.tolist()))
    builder = DatasetBuilder()
    builder.start_source("data.0", "rows", None)
    builder.add(np.arange(10, dtype=np.int32), None)
    builder.add(np.arange(20, 25, dtype=np.int32), None)
    batch = StepBatch(builder.finish(), [1, 0])
    batch.read_ahead([Segment(sequence=0, start=1, stop=5), Segment(sequence=1, start=2, stop=4)])
    assert asked == [[21, 22, 23, 24], [2, 3, 4]]
