"""The planners by name: built-in ones, those that a program registered, and those of installed packages.

A planner is a function from a `PlanRequest` to a list of microbatches. Packages register theirs as entry points of
group `lengthwise.planners`. `register_planner` affects its own process only, not the process that plans a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TypeAlias

from lengthwise.core.errors import ConfigError, LengthwiseError, PlanError, Problems, raise_problems
from lengthwise.core.names import PLANNER_GROUP, unknown_name
from lengthwise.core.plan import Microbatch, Plan
from lengthwise.planner.baselines.bytescale import plan_bytescale, plan_bytescale_naive
from lengthwise.planner.baselines.power_of_two import plan_power_of_two
from lengthwise.planner.baselines.single_degree import PACKED_DP, plan_packed_dp, plan_single_degree
from lengthwise.planner.baselines.static import plan_static
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.search import plan_lengthwise
from lengthwise.program.plan_rules import check_plan

Planner: TypeAlias = Callable[[PlanRequest], list[Microbatch]]

_REMEDY = "Correct the planner, or take another."
_BUILT_IN: Mapping[str, Planner] = {
    "lengthwise": plan_lengthwise,
    "static": plan_static,
    "single-degree": plan_single_degree,
    "bytescale-naive": plan_bytescale_naive,
    "bytescale": plan_bytescale,
    "power-of-two": plan_power_of_two,
    PACKED_DP: plan_packed_dp,
}
PLANNERS = tuple(_BUILT_IN)
CUTTING_PLANNERS = tuple(name for name in PLANNERS if name != PACKED_DP)  # planners for any lengths
_registered: dict[str, Planner] = {}


def register_planner(name: str, function: Planner) -> None:
    """Add or replace a planner in this process; ConfigError: the name of a built-in one, or not a function."""
    if not callable(function):
        expected, got = "a function from a PlanRequest to microbatches", f"a {type(function).__name__}"
        raise ConfigError(f"planner {name}", expected=expected, got=got, remedy="Register a function.")
    if not name or name in _BUILT_IN:
        remedy = f"Register it under a name other than {', '.join(PLANNERS)}."
        raise ConfigError("planner", expected="a name of its own", got=repr(name), remedy=remedy)
    _registered[name] = function


def planner_names() -> tuple[str, ...]:
    """Return all valid names for `PlanOptions.planner`, built-in ones first."""
    return tuple(dict.fromkeys((*PLANNERS, *_registered, *sorted(_installed()))))


def unknown_planner(where: str, name: str) -> ConfigError | None:
    """Return the error for a name that is not in `planner_names()`, or None if it is."""
    if name in PLANNERS:
        return None
    known = planner_names()  # asks all packages: 50 ms
    return None if name in known else unknown_name(where, name, known)


def find_planner(name: str) -> Planner:
    """Return the planner with a name of `planner_names()`; PlanError: its entry point cannot be loaded."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    return lambda request: _asked(name, request)


def check_registered(name: str, plan: Plan) -> None:
    """Raise PlanError, or Problems, naming the planner, for a plan of a foreign planner that cannot be run."""
    try:
        check_plan(Plan.from_json(plan.to_json(), "plan"))
    except TypeError as error:
        raise _broken(name, "plain numbers, as in JSON", str(error)) from None
    except LengthwiseError as error:
        problems = error.problems if isinstance(error, Problems) else (error,)
        raise_problems([_named(name, problem) for problem in problems])


def _named(name: str, error: LengthwiseError) -> PlanError:
    return PlanError(f"planner {name}, {error.where}", expected=error.expected, got=error.got, remedy=_REMEDY)


def _asked(name: str, request: PlanRequest) -> list[Microbatch]:
    """Call a foreign planner; errors name it, whatever it raises or returns."""
    function = _registered[name] if name in _registered else _loaded(_installed()[name])
    try:
        microbatches = list(function(request))
        _refuse_outside(name, microbatches, request)
    except LengthwiseError:
        raise
    except Exception as error:
        raise _broken(name, "a list of microbatches", f"{type(error).__name__}: {error}") from error
    return microbatches


def _refuse_outside(name: str, microbatches: list[Microbatch], request: PlanRequest) -> None:
    for microbatch in microbatches:
        if not isinstance(microbatch, Microbatch):
            raise _broken(name, "a list of microbatches", f"a {type(microbatch).__name__} in it")
    problems = [
        _broken(name, f"ranks from 0 to {request.cluster.ranks - 1} and sequences from 0 to {len(request.tokens) - 1}",
                f"ranks {piece.ranks} with sequences {piece.sequences}")
        for microbatch in microbatches
        for piece in microbatch.pieces
        if not set(piece.ranks) <= set(range(request.cluster.ranks))
        or not set(piece.sequences) <= set(range(len(request.tokens)))
    ]  # fmt: skip
    raise_problems(problems[:1])


def _loaded(point: EntryPoint) -> Planner:
    try:
        function: Planner = point.load()
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise _broken(point.name, f"an object at entry point {point.value}", got) from error
    if not callable(function):
        raise _broken(point.name, f"a function at entry point {point.value}", f"a {type(function).__name__}")
    return function


def _broken(name: str, expected: str, got: str) -> PlanError:
    return PlanError(f"planner {name}", expected=expected, got=got, remedy=_REMEDY)


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=PLANNER_GROUP) if point.name not in _BUILT_IN}
