"""What rounding allows in bf16: twice what plain models of that kind are off, and nothing where one broke."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.run.rounding import Difference, plain_kernels, rounding_of
from lengthwise.run.verify import VerifyReport

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
