"""What a planner may choose beside degrees: offload, the split of heads, and one kind of recomputation for all.

Each of them can only be asked of costs with all terms. Whatever may be chosen, a planner is also asked to plan without
it, and what ends sooner is kept: `bytescale` with the fewest ranks that free offload allows ends later than without at
scale, and no rule of any planner is so good that more freedom could not mislead it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from lengthwise.core.errors import ConfigError, LengthwiseError, raise_problems
from lengthwise.core.names import unknown_name
from lengthwise.core.shape import Cluster
from lengthwise.cost import Choices, Cost

CHOICES = ("off", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Freedom:
    """What one call of the planner may choose: `offload` and `heads`, one of `CHOICES` each, under one `recompute`."""

    recompute: str = "none"
    offload: str = "off"
    heads: str = "off"

    def widest(self, cost: Cost, cluster: Cluster, layers: int) -> Cost:
        """Return the costs with all of it: what the bound is for."""
        return cost.choosing(
            Choices(
                recompute=self.recompute,
                splits_heads=self.heads == "auto",
                offloads_above_tokens=cluster.capacity_tokens if self.offload == "auto" else inf,
                layers=layers,
            )
        )

    def variants(self, widest: Cost, longest_tokens: int, cluster: Cluster, *, decides_heads: bool) -> Iterator[Cost]:
        """Yield the costs to plan with, the least freedom first.

        Args:
            widest: of the method above.
            longest_tokens: of the step; nothing that a device holds by itself is worth offloading.
            cluster: ranks and capacity.
            decides_heads: whether the planner chooses degrees for the sake of split heads.
        """
        if not widest.chooses:
            yield widest
            return
        offloads = [False] * (longest_tokens <= cluster.longest_tokens)
        offloads += [True] * (widest.offloads and longest_tokens > cluster.capacity_tokens)
        for splits_heads in [False] + [True] * (widest.choices.splits_heads and decides_heads):
            for offload in offloads:
                variant = replace(widest, choices=replace(widest.choices, splits_heads=splits_heads))
                yield variant if offload else variant.without_copies()


def refuse_choices(freedom: Freedom, cost: Cost | None, layers: int, speeds: Sequence[float] | None) -> None:
    """Refuse what these costs (None: not known yet) cannot price, or ranks of these speeds do not plan.

    Raises:
        ConfigError, Problems: no choice of that name, costs without the terms for it, or fewer layers than the costs
        have.
    """
    problems: list[LengthwiseError] = []
    for name, value in (("offload", freedom.offload), ("heads", freedom.heads)):
        if value not in CHOICES:
            problems.append(unknown_name(name, value, CHOICES))
        elif value == "auto" and cost is not None and not cost.prices_choices:
            remedy = f"Plan with a hardware description ({{hardware}}), or without {{{name}}}."
            got = f"costs {cost.version}, which do not tell what {name} takes"
            problems.append(ConfigError(name, expected="off, with these costs", got=f"auto; {got}", remedy=remedy))
    if freedom.offload == "auto" and cost is not None and cost.prices_choices and layers < cost.layers:
        expected = f"those of the model, at least {cost.layers}: they tell what offload leaves on the device"
        problems.append(ConfigError("layers", expected=expected, got=str(layers), remedy="Give {layers} to plan_step."))
    if "auto" in (freedom.offload, freedom.heads) and speeds is not None:
        expected = "all 1 beside offload or heads, which are not planned together yet"
        remedy = "Plan with {speeds}, or with these choices."
        problems.append(ConfigError("speeds", expected=expected, got="unequal ranks", remedy=remedy))
    raise_problems(problems)
