"""Numbers as text for readers."""

from __future__ import annotations

_ROUNDS_UP = 0.9995  # from here on three digits are those of the next unit: 1.00M, never 1000K


def count(value: float) -> str:
    """Return a count in three significant digits: 731, 12.1K, 1.05M, 384M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= _ROUNDS_UP * limit:
            return f"{_three_digits(value / limit)}{unit}"
    return f"{value:.0f}" if value == int(value) or value >= 100 else _three_digits(value)


def seconds(value: float) -> str:
    """Return a duration with its unit: 3.20 ms, 1.25 s, 2 min 05 s, 9 h 38 min."""
    if value < _ROUNDS_UP * 1e-3:
        return f"{_three_digits(value * 1e6)} us"
    if value < _ROUNDS_UP:
        return f"{_three_digits(value * 1e3)} ms"
    if value < 100:
        return f"{_three_digits(value)} s"
    if value < 100 * 60:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours} h {minutes:02d} min"


def clock(value: float) -> str:
    """Return a duration in whole seconds, minutes and hours: 0:07, 12:05, 9:38:00, 3 d 04 h."""
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24} d {hours % 24:02d} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def unitless(value: float) -> str:
    """Return a time in a unit of the user's, in six digits, or with all digits before the point."""
    return f"{value:.0f}" if 1e6 <= value < 1e15 else f"{value:.6g}"


def percent(ratio: float) -> str:
    """Return a ratio of 0.1234 as 12.3 %; one that rounds to 0.0 % has no sign."""
    return f"{round(100 * ratio, 1) + 0.0:.1f} %"


def _three_digits(value: float) -> str:
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"
