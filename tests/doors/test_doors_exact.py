"""However a training lies over ranks and wherever it is started: the losses and the model of one plain process.

A cell of (door, layout, loss) that is refused is a row of `config/together.py`, and tested where that is.
"""

import pytest

from doors import plain
from doors.trained import DOORS, LAYOUTS, MORE
from tiers import more

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated"),  # peft and TRL read it
    pytest.mark.filterwarnings("ignore:(train|eval)_dataset. .* without a label"),
]
ALL = {**LAYOUTS, **MORE}
CELLS = [
    (name, layout, loss)
    for name, door in DOORS.items()
    for layout in ALL
    if door.takes(ALL[layout])
    for loss in door.losses
]
DEFAULT = [
    *(("train", layout, "next token") for layout in ("zero3", "stages")),
    ("session", "zero1", "by sequence"),
    ("session", "virtual stages", "by sequence"),
    ("session", "layers computed again", "by token"),
    ("session", "split heads", "token loss"),
    ("trainer", "hybrid", "compute_loss"),
    ("trainer", "stages", "next token"),
    ("sft", "adapters", "compute_loss"),
    ("sft", "optimizer on the host", "next token"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return plain.make_models(tmp_path_factory.mktemp("models"))


def bar(door, loss, name):
    """fp64, but for losses that Trainer logs in fp32, and for all that follows where TRL computes its own in fp32."""
    if (door, loss) == ("sft", "next token"):
        return 5e-5
    return 2e-7 if name[1] == "loss" and door in ("sft", "trainer") else 1e-11


@pytest.mark.parametrize(("door", "layout", "loss"), [cell if cell in DEFAULT else more(*cell) for cell in CELLS])
def test_a_training_is_that_of_one_plain_process(door, layout, loss, models, tmp_path, monkeypatch):
    plain.keep_precision(monkeypatch)
    how = ALL[layout]
    found, steps = DOORS[door].train(how, loss, models, tmp_path)
    assert sorted(number for step in steps for number in step) == [*range(len(plain.ROWS))]
    expected, is_cut = plain.reference(models, how.model, loss, steps), how.ranks > how.settings.get("stages", 1)
    for own in found:
        assert own.weights.keys() == expected.weights.keys()
        differences = {name: (own.weights[name] - each).norm() / each.norm() for name, each in expected.weights.items()}
        for step, (ours, plains) in enumerate(zip(own.steps, expected.steps, strict=True)):
            numbers = zip(("loss", "norm", "evaluated"), ours, plains, strict=False)
            differences |= {(step, name): abs(one - other) / abs(other) for name, one, other in numbers}
        assert {name: each for name, each in differences.items() if not each < bar(door, loss, name)} == {}
        assert any(share for *_, share in own.steps) == is_cut


def test_by_default_each_layout_is_run_each_door_with_two_layouts_and_each_loss():
    assert set(DEFAULT) <= set(CELLS)
    assert {name for _, name, _ in DEFAULT} >= set(LAYOUTS)
    assert min(len({name for own, name, _ in DEFAULT if own == door}) for door in DOORS) >= 2
    assert {loss for *_, loss in DEFAULT} == set(plain.LOSSES)
