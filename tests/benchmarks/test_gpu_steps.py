"""Steps beside plain Hugging Face: the same losses, the same updates, torch's varlen call as each release has it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import relative_error

from gpu import loops, steps
from gpu.loops import OurLoop, PlainLoop
from gpu.rows import Records, page_of, read_rows
from gpu.setting import packs_of, plan_for, sizes_of
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.engine.batch import random_batch

CPU = torch.device("cpu")
LENGTHS = [50, 3, 20, 1, 30]


@pytest.mark.parametrize(("packed", "recompute"), [(False, "none"), (True, "layer")])
def test_rivals_take_the_same_steps(packed, recompute):
    cost = all_terms_cost(named_shape("tiny"), named_hardware("cpu"))
    cluster = Cluster(ranks=1, capacity_tokens=64)
    plan = plan_for(LENGTHS, cost, cluster, layers=2, recompute=recompute)
    assert {each.recompute for each in plan.microbatches} == {recompute}
    batch = random_batch(LENGTHS, vocab=256)
    ours = OurLoop("tiny", CPU, torch.float32)
    rival = PlainLoop("tiny", CPU, torch.float32, packed=packed, pack_tokens=64)
    for _ in range(3):
        assert rival.step(plan, batch) == pytest.approx(ours.step(plan, batch), rel=1e-5)
    assert relative_error(rival.parameters.values, ours.parameters.values) < 1e-6
    assert rival.model.config._attn_implementation == (loops.VARLEN if packed else "sdpa")


@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=40), pack_tokens=st.integers(1, 100))
def test_packs_hold_all_and_no_more_than_asked_unless_alone(lengths, pack_tokens):
    packs = packs_of(lengths, pack_tokens)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(len(pack) == 1 or sum(lengths[index] for index in pack) <= pack_tokens for pack in packs)


def test_an_error_of_a_loop_is_its_row_and_a_summary_comes_with_two_repeats(tmp_path, monkeypatch):
    """What compiles comes last: without a compiler its error costs no other row."""
    build, built = steps._build, []

    def maybe(sizes, turn):
        built.append(turn.loop)
        if turn.loop == steps.COMPILED:
            raise RuntimeError("no gcc was found\nlong story")
        if turn.loop == steps.ONE_BY_ONE:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return build(sizes, turn)

    monkeypatch.setattr(steps, "_build", maybe)
    monkeypatch.setattr(steps, "_let_go", lambda _: None)
    sizes = replace(sizes_of("cpu", tiny=True), step_compiled=True)
    with pytest.raises(SystemExit, match="steps: lengthwise, compiled raised"):
        steps.steps(sizes, Records(tmp_path, "steps"))
    assert built == [*steps.EAGER, *reversed(steps.EAGER), steps.COMPILED]
    rows = read_rows(tmp_path)
    tables = [(row["table"], row["loop"]) for row in rows]
    assert tables[:2] == [("step, each turn", steps.OURS), ("step", steps.OURS)]
    found = {row["loop"]: row for row in rows if row["table"] == "step"}
    assert (found[steps.OURS]["repeats"], found[steps.PACKED]["repeats"]) == (4, 4)
    assert found[steps.PACKED]["times_lengthwise"] > 0
    assert found[steps.ONE_BY_ONE]["refused"] == "CUDA out of memory."
    assert found[steps.COMPILED]["refused"] == "RuntimeError: no gcc was found"
    lines = [line for line in page_of(rows).splitlines() if line.startswith("| tiny |")]
    assert len(lines) == 4, "of each loop the last summary"
