"""Which cases run by default: `more` marks those that `make test-all` alone runs (docs/architecture.md)."""

from collections.abc import Iterable
from typing import Any

import pytest


def more(*values: Any) -> Any:
    """Return a case that only `make test-all` runs, as do all cases that it is combined with."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def some(cases: Iterable[Any], *kept: int) -> list[Any]:
    """Return the cases, of which those at the places `kept` run by default; without places the first."""
    cases = list(cases)
    places = {place % len(cases) for place in kept or (0,)}
    return [
        case if number in places else more(*(case if isinstance(case, tuple) else (case,)))
        for number, case in enumerate(cases)
    ]
