"""Small mixed-integer linear programs, solved by HiGHS (PyPI `highspy`, MIT), imported when needed.

One thread, a fixed seed and a limit in branch-and-bound nodes: the same program gives the same answer.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What solving brought.

    values: the best ones found, by variable number; None if none were found that obey all rows.
    bound: no values have a lower objective; infinite if it is proven that none obey all rows.
    """

    values: NDArray[np.float64] | None
    bound: float


class Program:
    """Minimize a linear objective over variables and rows, which are added one by one; ConfigError: no highspy."""

    def __init__(self) -> None:
        self._highspy = load_solver()
        self._solver, self._variables = _quiet_solver(self._highspy), 0

    def add_variable(
        self, lower: float = 0.0, upper: float = math.inf, *, cost: float = 0.0, whole: bool = False
    ) -> int:
        """Add a variable and return its number."""
        number, self._variables = self._variables, self._variables + 1
        self._solver.addVar(lower, upper)
        self._solver.changeColCost(number, cost)
        if whole:
            self._solver.changeColIntegrality(number, self._highspy.HighsVarType.kInteger)
        return number

    def add_choice(self) -> int:
        """Add a variable that is 0 or 1 and return its number."""
        return self.add_variable(0.0, 1.0, whole=True)

    def add_row(self, terms: Mapping[int, float], *, at_least: float = -math.inf, at_most: float = math.inf) -> None:
        """Hold a weighted sum of variables between two limits."""
        numbers, values = np.array(list(terms), dtype=np.int32), np.array(list(terms.values()), dtype=np.float64)
        self._solver.addRow(at_least, at_most, len(terms), numbers, values)

    def solve(self, *, relative_gap: float, most_nodes: int) -> Solution:
        """Solve to within `relative_gap`, or as far as `most_nodes` go."""
        solver, highspy = self._solver, self._highspy
        limits = {"mip_rel_gap": relative_gap, "mip_max_nodes": most_nodes, "mip_feasibility_tolerance": 1e-9}
        for name, value in {"threads": 1, "random_seed": 0, **limits}.items():
            solver.setOptionValue(name, value)
        solver.run()
        info = solver.getInfo()
        if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return Solution(values=None, bound=math.inf)
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = np.array(solver.getSolution().col_value) if found else None
        return Solution(values=values, bound=float(info.mip_dual_bound))


def load_solver() -> Any:
    """Import the solver's package; ConfigError: it is not installed."""
    try:
        return importlib.import_module("highspy")
    except ImportError:
        expected, remedy = "the HiGHS solver", "pip install highspy"
        raise ConfigError("highspy", expected=expected, got="no package highspy", remedy=remedy) from None


def _quiet_solver(highspy: Any) -> Any:
    class Solver(highspy.Highs):
        # The constructor's call of it prints a banner from 1.16 on.
        def enableCallbacks(self) -> None:  # noqa: N802
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    solver = Solver()
    solver.setOptionValue("output_flag", False)  # the constructor of earlier versions calls nothing
    return solver
