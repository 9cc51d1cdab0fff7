"""Small mixed-integer linear programs, solved by HiGHS (PyPI `highspy`, MIT, extra `bench`), imported when needed.

One thread, a fixed seed and a limit in branch-and-bound nodes: the same program gives the same answer.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What solving brought.

    values: the best ones found, by variable number; None if none were found that obey all rows.
    bound: no values have a lower objective; infinite if it is proven that none obey all rows.
    """

    values: NDArray[np.float64] | None
    bound: float


@dataclass(slots=True, kw_only=True)
class Program:
    """Minimize a linear objective over variables and rows, which are added one by one."""

    _costs: list[float] = field(default_factory=list)
    _bounds: list[tuple[float, float]] = field(default_factory=list)
    _whole: list[bool] = field(default_factory=list)
    _rows: list[tuple[float, Mapping[int, float], float]] = field(default_factory=list)

    def add_variable(
        self, lower: float = 0.0, upper: float = math.inf, *, cost: float = 0.0, whole: bool = False
    ) -> int:
        """Add a variable and return its number."""
        self._costs.append(cost)
        self._bounds.append((lower, upper))
        self._whole.append(whole)
        return len(self._costs) - 1

    def add_choice(self) -> int:
        """Add a variable that is 0 or 1 and return its number."""
        return self.add_variable(0.0, 1.0, whole=True)

    def add_row(self, terms: Mapping[int, float], *, at_least: float = -math.inf, at_most: float = math.inf) -> None:
        """Hold a weighted sum of variables between two limits."""
        self._rows.append((at_least, terms, at_most))

    def solve(self, *, relative_gap: float, most_nodes: int) -> Answer:
        """Solve to within `relative_gap`, or as far as `most_nodes` go; ConfigError: highspy is not installed."""
        try:
            highspy = importlib.import_module("highspy")
        except ImportError:
            raise ConfigError(
                "highspy",
                expected="the HiGHS solver",
                got="no package highspy",
                remedy="pip install 'lengthwise[bench]'",
            ) from None
        solver = _quiet_solver(highspy)
        for name, value in (
            ("threads", 1),
            ("random_seed", 0),
            ("mip_rel_gap", relative_gap),
            ("mip_max_nodes", most_nodes),
            ("mip_feasibility_tolerance", 1e-9),
        ):
            solver.setOptionValue(name, value)
        solver.passModel(self._as_lp(highspy))
        solver.run()
        info = solver.getInfo()
        if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return Answer(values=None, bound=math.inf)
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        return Answer(
            values=np.array(solver.getSolution().col_value) if found else None, bound=float(info.mip_dual_bound)
        )

    def _as_lp(self, highspy: Any) -> Any:
        model = highspy.HighsLp()
        kinds = highspy.HighsVarType
        model.num_col_, model.num_row_ = len(self._costs), len(self._rows)
        model.col_cost_ = np.array(self._costs)
        model.col_lower_ = np.array([lower for lower, _ in self._bounds])
        model.col_upper_ = np.array([upper for _, upper in self._bounds])
        model.row_lower_ = np.array([lower for lower, _, _ in self._rows])
        model.row_upper_ = np.array([upper for _, _, upper in self._rows])
        model.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for whole in self._whole]
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0] + [len(terms) for _, terms, _ in self._rows]).astype(np.int32)
        matrix.index_ = np.array([number for _, terms, _ in self._rows for number in terms], dtype=np.int32)
        matrix.value_ = np.array([value for _, terms, _ in self._rows for value in terms.values()])
        return model


def _quiet_solver(highspy: Any) -> Any:
    class Solver(highspy.Highs):
        # The constructor's call of it prints a banner from 1.16 on.
        def enableCallbacks(self) -> None:  # noqa: N802
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    solver = Solver()
    solver.setOptionValue("output_flag", False)  # the constructor of earlier versions calls nothing
    return solver
