"""Forecasts of published runs: as near as the page says, and the page is the one that the command writes."""

from pathlib import Path

import pytest

import forecasts


@pytest.mark.parametrize("run", [run for run in forecasts.RUNS if run.long], ids=lambda run: f"{run.model} {run.what}")
def test_published_rings_are_forecast_to_6_percent(run: forecasts.Run) -> None:
    assert forecasts.forecast(run)[0] == pytest.approx(run.seconds, rel=0.06)


def test_published_short_steps_lie_between_their_two_prices() -> None:
    short = [run for run in forecasts.RUNS if not run.long]
    for none, layer in zip(short[::2], short[1::2], strict=True):
        assert (none.recompute, layer.recompute) == ("none", "layer")
        assert forecasts.forecast(none)[0] < none.seconds < forecasts.forecast(layer)[0]


def test_the_page_has_what_the_command_prints() -> None:
    page = Path(forecasts.__file__).parents[1] / "docs/benchmarks/forecasts.md"
    assert "\n".join(forecasts.lines()) in page.read_text(encoding="utf-8")
