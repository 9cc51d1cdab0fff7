import pytest

from data.stores import load, prepare, write_sources
from lengthwise.engine.batch import StepBatch
from lengthwise.program import Segment


def test_a_batch_asks_for_the_rows_of_its_segments_and_reads_none(tmp_path, monkeypatch):
    rows = [{"input_ids": [*range(10)]}, {"input_ids": [20, 21, 22], "labels": [-100, 21, 22]}]
    prepare(write_sources(tmp_path, [rows]), tmp_path / "store")
    batch, asked = StepBatch(load(tmp_path / "store"), [1, 0]), list[list[int]]()
    monkeypatch.setattr("lengthwise.data.arrow.read_ahead", lambda values: asked.append(values.tolist()))
    monkeypatch.setattr("lengthwise.data.arrow.row_digest", lambda *_row: pytest.fail("a row was read"))
    batch.read_ahead([Segment(sequence=0, start=1, stop=2), Segment(sequence=1, start=2, stop=4)])
    assert asked == [[20, 21, 22], [-100, 21, 22], [*range(10)]]
