"""Gains of a step that computes prompts once, as text and as figures."""

from __future__ import annotations

from typing import Any

from lengthwise.core.names import counted
from lengthwise.planner.service.step_planning import LEAST_SAVED
from lengthwise.report.figures import percent, seconds
from lengthwise.simulator import Branches, Comparison, Found


def branches_text(branches: Branches | None) -> str:
    """Return which prompts sequences share, in words; "" if none."""
    if branches is None:
        return ""
    return f"{branches.completions} completions of each prompt of {branches.prompt_tokens:,} tokens, counted in each"


def branches_notes(comparison: Comparison) -> list[str]:
    """Return what prompts computed once save, or why they are not; [] if sequences share none."""
    apart = comparison.apart.found
    if comparison.scenario.branches is None or apart is None:
        return []
    found = None if comparison.shared is None else comparison.shared.found
    if found is None or not _sharing(found):
        return [f"Prompts are not computed once: {_obstacle(found)}."]
    sharing = _sharing(found)
    steps = f" in {sharing} of {counted(len(found.steps), 'step')}" * (sharing < len(found.steps))
    once = f"Prompts computed once{steps}: {percent(_saved_tokens(found))} fewer tokens than in whole sequences"
    whole = f"with these Lengthwise takes {seconds(apart.mean_seconds)} on the same mesh"
    return [f"{once}, as FSDP2 computes them; {whole}, {apart.mean_seconds / found.mean_seconds:.2f}x as long."]


def _obstacle(found: Found | None) -> str:
    """Return the reason why no plan shares prompts. found: result of planning with shared prompts, if any."""
    least = f"Lengthwise does it where it saves more than {100 * LEAST_SAVED:.0f} % of the time"
    saved = [] if found is None else [step.saved_ratio for step in found.steps if step.saved_ratio is not None]
    if saved:
        ratio = sum(saved) / len(saved)
        would = f"save {percent(ratio)} of" if ratio > 0 else f"add {percent(-ratio)} to"
        return f"that would {would} the predicted time; {least}"
    return "the GPUs hold no prompt together with two of its completions"


def branches_json(comparison: Comparison) -> dict[str, Any] | None:
    """Return the figures of a step that computes prompts once, or None if sequences share none or nothing fits.

    whole_step_seconds: step time of Lengthwise with each sequence whole, on the same mesh. saved_tokens_ratio: share of
    all tokens. saved_seconds_ratio: per step the predicted share; if it shares none, what sharing would save, or None
    if it cannot.
    """
    branches, apart = comparison.scenario.branches, comparison.apart.found
    if branches is None or apart is None:
        return None
    found = comparison.ours.found
    assert found is not None, "what fits with whole sequences"
    return {
        "completions": branches.completions,
        "prompt_tokens": branches.prompt_tokens,
        "steps_sharing": _sharing(found),
        "saved_tokens_ratio": _saved_tokens(found),
        "saved_seconds_ratio": [step.saved_ratio for step in found.steps],
        "whole_step_seconds": apart.step_seconds,
    }


def _sharing(found: Found) -> int:
    return sum(step.shares_prompts for step in found.steps)


def _saved_tokens(found: Found) -> float:
    return 1 - found.mean("computed_tokens") / found.mean("num_tokens")
