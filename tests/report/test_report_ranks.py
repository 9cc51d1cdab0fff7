"""GPUs over time as text: what each character stands for."""

from lengthwise.report.ranks import gpu_lines
from lengthwise.simulator import Row
from lengthwise.simulator.answer import Stretch


def test_gpu_lines_show_packs_rings_and_waits() -> None:
    stretches = (
        Stretch(rank=0, start=0.0, end=4.0, kind="ring"),
        Stretch(rank=1, start=0.0, end=4.0, kind="ring"),
        Stretch(rank=0, start=4.0, end=8.0, kind="local"),
        Stretch(rank=1, start=5.0, end=6.0, kind="local"),
    )
    row = Row(name="x", step_seconds=(9.0, 1.0), stretches=stretches)
    assert gpu_lines(row, range(2), most_seconds=10.0, width=10) == ["GPU 0 |====####.|", "GPU 1 |====.#...|"]
    assert gpu_lines(row, [1], most_seconds=20.0, width=10) == ["GPU 1 |==#.|"]
