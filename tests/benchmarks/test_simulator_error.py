"""The forecast of `simulator_error`: from a profile made before, and of lengths that the profile did not run."""

import json

import pytest

import simulator_error
from lengthwise.core.measurements import Fit, Measurements, Place, Sample, Term, TermName
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.cost import named_shape
from lengthwise.cost.measured import measured_cost, measured_model
from lengthwise.simulator import simulate_plan


def _measurements() -> Measurements:
    place = Place(device="cpu", processor="x", cores=2, threads=1, ranks=2, ranks_per_node=2, clock="wall", versions={})
    values: dict[TermName, float] = {"quadratic_seconds": 1e-8, "linear_seconds": 1e-4, "fixed_seconds": 1e-3}
    fit = Fit(
        terms={name: Term(value=value, relative_error=0.01) for name, value in values.items()},
        not_measured=(),
        block_efficiency=(),
        mean_error=0.0,
        worst_error=0.0,
    )
    sample = Sample(
        kind="local",
        lengths=(128, 64),
        degree=1,
        tier="none",
        num_bytes=0,
        seconds=1.0,
        forward_seconds=None,
        repeats=1,
        spread=0.0,
    )
    model = measured_model(named_shape("tiny"))
    return Measurements(
        date="now", place=place, model=model, precision="fp32", hardware="cpu", fit=fit, samples=(sample,)
    )


def _plan(*tokens: int) -> Plan:
    pieces = [Piece(ranks=(i % 2,), sequences=(i,)) for i in range(len(tokens))]
    microbatches = tuple(Microbatch(pieces=(piece,)) for piece in pieces)
    return Plan(ranks=2, layers=2, capacity=4096, tokens=tokens, microbatches=microbatches)


def test_forecast_is_the_simulation_with_the_profiles_costs() -> None:
    found, plan = _measurements(), _plan(1000, 700)
    (seconds,) = simulator_error.forecast_seconds([plan], found)
    assert seconds == simulate_plan(plan, measured_cost(found)).step_seconds
    assert seconds > 1000 * 1e-4


def test_forecast_of_a_length_that_was_profiled_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"lengths \[64\]"):
        simulator_error.forecast_seconds([_plan(1000, 64)], _measurements())


def test_documents_of_lengths_that_were_profiled_are_left_out(tmp_path) -> None:
    path = tmp_path / "documents.jsonl"
    simulator_error.write_documents(path, 3000, ())
    lengths = [len(json.loads(line)["text"].encode()) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lengths) > 20
    assert max(lengths) <= 3000
    simulator_error.write_documents(path, 3000, {lengths[3]})
    left = [len(json.loads(line)["text"].encode()) for line in path.read_text(encoding="utf-8").splitlines()]
    assert left == [each for each in lengths if each != lengths[3]]


def test_forecast_summary_says_whether_the_aim_is_met() -> None:
    met = simulator_error.summary([1.0, 2.0], [1.1, 1.9])
    assert "2 steps: mean absolute error 7.5 % (aim: 10 %, met)" in met
    assert "single steps -5.0 to +10.0 %, all steps together +0.0 %" in met
    assert "**missed**" in simulator_error.summary([1.0], [0.8])
