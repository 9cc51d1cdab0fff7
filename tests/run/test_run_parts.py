"""The parts of the engine that can be tried without training: batches, slices, metrics, what rounding allows."""

import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing import make_plan
from testing.ranks import fork_ranks

from lengthwise.comm import World
from lengthwise.core.errors import DataError
from lengthwise.core.plan import Piece
from lengthwise.run import main
from lengthwise.run.callbacks import StepMetrics
from lengthwise.run.launch import StopRequest
from lengthwise.run.prepared_run import join_with
from lengthwise.run.rounding import Difference, plain_kernels, rounding_of
from lengthwise.run.verify import VerifyReport


def test_step_metrics_by_hand():
    placed = (((0, 1), 2), ((2,), 0), ((0,), 1))
    plan = make_plan(3, [10, 20, 30], [Piece(ranks=ranks, sequences=(each,)) for ranks, each in placed])
    found = StepMetrics(
        plan=plan, step=4, loss=2.0, grad_norm=0.5, lr=0.1, num_loss_tokens=57, busy_seconds=[4.0, 1.0, 1.0],
        step_seconds=8.0, plan_seconds=0.25, predicted_step_seconds=7.0, peak_memory_bytes=1, offloaded_bytes=0,
        offload_wait_seconds=0.0, exposed_ring_seconds=0.0,
    )  # fmt: skip
    assert (found.num_sequences, found.num_tokens, found.num_loss_tokens, found.num_microbatches) == (3, 60, 57, 3)
    assert (found.imbalance_ratio, found.idle_ratio, found.ring_token_ratio) == (2, 0.75, 0.5)
    assert found.tokens_per_second == 7.5


def test_stop_request_is_known_to_one_that_listens_later():
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell runs the tests in the background
    with StopRequest().listening() as first:
        os.kill(os.getpid(), signal.SIGTERM)
        assert first.signal == signal.SIGTERM
        with StopRequest().listening() as second:
            assert second.signal == signal.SIGTERM
            os.kill(os.getpid(), signal.SIGINT)
        assert (second.signal, first.times) == (signal.SIGTERM, 1)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2e-12])
@pytest.mark.parametrize("place", ["gradient", "loss", "reference_loss", "router_loss", "reference_router_loss"])
def test_verification_fails_at_nan_infinity_and_what_is_over_the_tolerance(place, bad):
    keys = {
        "plan": make_plan(1, [2], [Piece(ranks=(0,), sequences=(0,))]),
        "gradients": {"a": 1e-13, "b": 0.0, "c": 1e-13},
        "tolerance": 1e-12,
        **dict.fromkeys(("loss", "reference_loss", "router_loss", "reference_router_loss"), 1.0),
    }
    assert VerifyReport(**keys).passed
    changed = {"gradients": {**keys["gradients"], "b": bad}} if place == "gradient" else {place: 1.0 + bad}
    assert not VerifyReport(**{**keys, **changed}).passed


def test_what_one_rank_finds_wrong_is_raised_on_all_ranks():
    def work(world):
        def read():
            if world.rank == 1:
                raise DataError("train.jsonl:3", expected="x", got="y", remedy="z")
            return world.rank

        try:
            join_with(world, read, timeout_seconds=20, on_phase=lambda _phase: None)
        except DataError as error:
            return str(error)

    assert fork_ranks(work, 3) == ["error[data] train.jsonl:3: expected x; got y. z"] * 3


def test_under_torchrun_a_second_signal_does_not_end_a_run_of_one_rank(monkeypatch):
    """A cluster signals all processes of a job, and torchrun its own again: the checkpoint must still be committed."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert main._is_alone(World(rank=0, world_size=1))
    assert not main._is_alone(World(rank=0, world_size=2))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert not main._is_alone(World(rank=0, world_size=1))


NAMES = ("layers.0.q.weight", "layers.11.q.weight", "layers.0.experts.3.up", "layers.1.experts.12.up", "norm.weight")
SMALL = st.floats(0, 1)


def difference(values, *, loss=0.0):
    return Difference(loss=loss, router_loss=0.0, gradients=dict(zip(NAMES, values, strict=True)))


def report(gradients, rounding, *, loss=1.0):
    keys = {"loss": loss, "reference_loss": 1.0, "gradients": gradients, "tolerance": 0.002}
    return VerifyReport(plan=None, rounding=rounding, **keys)


@given(*(st.lists(SMALL, min_size=5, max_size=5) for _ in range(3)), SMALL, SMALL)
def test_planned_model_may_be_twice_as_far_as_the_worst_plain_one_of_its_kind(first, second, found, loss, other):
    rounding = rounding_of({"sdpa": difference(first, loss=loss), "eager": difference(second, loss=other)})
    both = [max(a, b) for a, b in zip(first, second, strict=True)]
    kinds = [max(both[:2])] * 2 + [max(both[2:4])] * 2 + [both[4]]
    worst = [max(each, sorted(kinds)[2]) for each in kinds]
    assert [rounding.gradients[name] for name in NAMES] == worst
    assert (rounding.kernels, rounding.loss) == (("sdpa", "eager"), max(loss, other))
    made = report(dict(zip(NAMES, found, strict=True)), rounding)
    assert made.passed == all(a <= 2 * b + 0.002 for a, b in zip(found, worst, strict=True))


def test_losses_are_judged_by_rounding_too():
    rounding = rounding_of({"sdpa": difference([0.0] * 5, loss=0.01)})
    gradients = dict.fromkeys(NAMES, 0.0)
    assert report(gradients, rounding, loss=1.0219).passed
    assert not report(gradients, rounding, loss=1.0221).passed


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_plain_model_that_is_not_finite_allows_nothing(broken):
    for values in ([broken, 0.1, 0.1, 0.1, 0.1], [0.1, broken, 0.1, 0.1, 0.1]):
        rounding = rounding_of({"sdpa": difference([0.1] * 5), "eager": difference(values)})
        gradients = dict.fromkeys(NAMES, 0.0)
        assert report(gradients, rounding).passed
        for name, value, passed in ((0, 0.1, False), (0, broken, False), (1, 0.1, False), (4, 0.1, True)):
            assert report({**gradients, NAMES[name]: value}, rounding).passed == passed, "1 is of the same kind as 0"


def test_second_plain_kernel_is_one_that_fits_into_memory():
    for longest, on_gpu, second in ((4096, True, ("eager",)), (65536, True, ("flash",)), (65536, False, ())):
        assert plain_kernels("sdpa", longest=longest, heads=4, layers=2, on_gpu=on_gpu) == ("sdpa", *second)
