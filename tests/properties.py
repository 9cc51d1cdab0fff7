"""How many cases a property is tried on: the loaded profile says it, and a test never writes a number.

A property under plain `@given` is tried on as many cases as the profile gives; one whose case is expensive is marked
`@costly` or `@costliest` and takes a share of them. The seconds of a case are those of all parameters of the test.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import settings

Test = TypeVar("Test", bound=Callable[..., Any])


def costly(test: Test) -> Test:
    """Try a property on three tenths of the profile's cases: a case takes about 0.015 to 0.15 s, as a whole plan does.

    One whose every case counts stays plain all the same, such as attention against dense attention.
    """
    return _on_share(0.3, test)


def costliest(test: Test) -> Test:
    """Try a property on a tenth of the profile's cases: it takes more, as engines and comparisons of planners do."""
    return _on_share(0.1, test)


def _on_share(share: float, test: Test) -> Test:
    return settings(max_examples=round(settings.default.max_examples * share))(test)
