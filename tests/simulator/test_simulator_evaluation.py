"""Tables of every planner with its best mesh: figures follow from rows, by hand."""

from lengthwise.cost import named_hardware, named_shape
from lengthwise.simulator import Scenario
from meshes import Aim, MeshRow, Taken, add_line, best_tables, read_lines, search

PLACE = ("llama-7b", "github", "2M")


def _taken(seconds: float, *, trains: bool = True, flops_ratio: float = 0.5) -> Taken:
    return Taken(
        mesh="TP 1" if trains else "TP 8",
        seconds=[seconds, seconds],
        ideal_seconds=[4.0, 6.0],
        bound_seconds=[4.5, 6.5],
        flops_ratio=flops_ratio,
        trains=trains,
    )


def _row(planner: str, today: float | None, any_mesh: float | None, flops_ratio: float = 0.5) -> MeshRow:
    """Make a row whose best mesh of all is one that the engine refuses, unless both take as long."""
    first = None if today is None else _taken(today, flops_ratio=flops_ratio)
    other = None if any_mesh is None else _taken(any_mesh, trains=any_mesh == today, flops_ratio=flops_ratio)
    return MeshRow(place=PLACE, planner=planner, today=first, any_mesh=other, tried=3)


def _tables(*rows: MeshRow, least_gain: float = 1.1) -> str:
    aim = Aim(name="github", places=[PLACE], least_gain=least_gain)
    return "\n".join(best_tables(rows, ("model", "set", "longest"), [aim]))


def test_gains_of_today_are_told_apart_from_those_of_all_meshes() -> None:
    text = _tables(_row("static", 20.0, 8.0), _row("bytescale", 12.0, 12.0), _row("lengthwise", 10.0, 5.0))
    today = "| 20.00 | 12.00 | 10.00 | 1.20x over bytescale (1.20 to 1.20 by batch) "
    today += "| 0.80x over static (0.80 to 0.80 by batch) | 0.500 |"
    assert today in text
    assert "| 8.00 | 12.00 | 5.00 | 1.60x over static (1.60 to 1.60 by batch) | 1.60x | 1.000 |" in text


def test_only_plans_that_the_engine_runs_meet_an_aim_and_over_all_others() -> None:
    rows = (_row("static", 20.0, 8.0), _row("bytescale", 12.0, 12.0), _row("lengthwise", 10.0, 5.0))
    assert "| github | 1 of 1 | 0.80x | 1.10: **missed** | 1.60x | 0.500 |" in _tables(*rows)
    assert "| 1.20x | 1.15: met |" in _tables(rows[1], rows[2], least_gain=1.15)
    two = Aim(name="github", places=[PLACE, ("llama-70b", *PLACE[1:])], least_gain=1.15)
    few = "\n".join(best_tables(rows[1:], ("model", "set", "longest"), [two]))
    assert "| github | 1 of 2 | 1.20x | 1.15: met in 1 of 2 | 2.40x |" in few
    near = _tables(_row("static", 10.4, 10.4), _row("lengthwise", 10.0, 10.0), least_gain=1.03)
    assert "1.03: met, within the error |" in near
    nothing_today = _tables(rows[0], _row("lengthwise", None, 5.0))
    assert "| github | 0 of 1 | - |" in nothing_today
    assert "| 20.00 | - | - | - | - |" in nothing_today


def test_meshes_are_told_with_what_runs_what_is_equal_and_what_is_not_believed() -> None:
    equal = _tables(_row("static", 10.4, 10.4), _row("lengthwise", 10.0, 10.0))
    assert "| equal (1.04x) over static (1.04 to 1.04 by batch) | equal (1.04x) over static" in equal
    ours = _row("lengthwise", 10.0, 10.0, flops_ratio=0.76)
    text = _tables(_row("static", 20.0, 8.0), _row("packed-dp", None, None), ours)
    assert "equal" not in text
    assert "| static | yes | 20.00 | 0.250 | 0.50 | TP 1 |" in text
    assert "| static | no | 8.00 | 0.625 | 0.50 | TP 8 |" in text
    assert "| packed-dp | - | - | - | - | refused: no mesh holds the sequences |" in text
    assert "| lengthwise | yes | 10.00 | 0.500 | 0.76 (!) | TP 1 |" in text


def test_search_writes_what_the_package_found_and_refusals(tmp_path) -> None:
    shape, hardware = named_shape("llama-7b"), named_hardware("h100")
    scenario = Scenario(shape=shape, hardware=hardware, devices=8, context_tokens=2**15, tensors=(1, 2))
    row = search(PLACE, "static", [[30_000, *[2000] * 40], [4000] * 20], scenario)
    assert row.today.trains
    assert row.today.mesh.startswith("TP 1, ")
    assert 0 < row.today.ideal_ratio < 1
    assert row.today.bound_seconds[0] <= row.today.seconds[0]
    assert row.any_mesh.mean_seconds <= row.today.mean_seconds
    refused = search(PLACE, "static", [[10**9]], scenario)
    assert refused.today is refused.any_mesh is None
    assert refused.refused
    for each in (row, refused):
        add_line(tmp_path / "deep" / "rows.jsonl", each)
    assert [MeshRow.from_json(line) for line in read_lines(tmp_path / "deep" / "rows.jsonl")] == [row, refused]
    assert read_lines(tmp_path / "none") == []
