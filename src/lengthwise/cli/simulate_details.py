"""The details of `lengthwise simulate`: planners compared, each on its best mesh or all on one, in long tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lengthwise.cli.simulate_meshes import Meshes
from lengthwise.core.names import counted

if TYPE_CHECKING:
    from lengthwise.report.tables import ColumnTable
    from lengthwise.simulator import Best

USUAL = ("packed-dp", "static", "single-degree", "power-of-two", "bytescale", "lengthwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What was found by planner, and what is said of it; nothing by default. traces: files by planner."""

    found: Sequence[Best] = ()
    tables: Sequence[ColumnTable] = ()
    remarks: Sequence[str] = ()
    sentences: str = ""
    traces: Mapping[str, str] = field(default_factory=dict[str, str])


def compare_in_detail(
    meshes: Meshes,
    planners: Sequence[str],
    batches: Sequence[Sequence[int]],
    *,
    unit: str,
    names: Mapping[str, str],
    trace_ranks: int,
) -> Details:
    """Compare planners on the same batches.

    Args:
        meshes: of which each planner takes its best.
        planners: by name.
        batches: lengths of each.
        unit: what lengths were counted in.
        names: what the user typed for names of the library.
        trace_ranks: ranks that a trace shows.

    Raises:
        LengthwiseError: no planner has a mesh that holds these sequences.
    """
    from lengthwise.report.simulation import closing_sentences, remarks, shown_of, simulation_tables
    from lengthwise.simulator import chrome_trace

    found, question = meshes.compare(planners, batches), meshes.question
    return Details(
        found=found,
        tables=simulation_tables(found),
        remarks=remarks(
            found,
            device_bytes=question.hardware.device_bytes,
            names=names,
            may_train=question.trained_today() is not None,
        ),
        sentences=closing_sentences(
            found,
            f"{counted(question.devices, 'device')} of {question.hardware.name}",
            one_mesh=meshes.same is not None,
            not_compared=[name for name in USUAL if name not in planners],
            unit=unit,
        ),
        traces={
            each.planner: chrome_trace(
                each.result.first_plan,
                each.result.first,
                ranks_per_node=each.setting.cost.ranks_per_node,
                most_ranks=trace_ranks,
            )
            for each in shown_of(found)
        },
    )
