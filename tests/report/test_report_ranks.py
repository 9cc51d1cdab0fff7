"""GPUs over time as text: what each character stands for."""

from lengthwise.cli.demo import gpu_lines
from lengthwise.simulator import WayRow
from lengthwise.simulator.answer import WorkSpan


def test_gpu_lines_show_packs_rings_and_waits() -> None:
    stretches = (
        WorkSpan(rank=0, start=0.0, end=4.0, kind="ring"),
        WorkSpan(rank=1, start=0.0, end=4.0, kind="ring"),
        WorkSpan(rank=0, start=4.0, end=8.0, kind="local"),
        WorkSpan(rank=1, start=5.0, end=6.0, kind="local"),
    )
    row = WayRow(name="x", step_seconds=(9.0, 1.0), stretches=stretches)
    assert gpu_lines(row, range(2), most_seconds=10.0, width=10) == ["GPU 0 |====####.|", "GPU 1 |====.#...|"]
    assert gpu_lines(row, [1], most_seconds=20.0, width=10) == ["GPU 1 |==#.|"]
