"""What GPUs do over one simulated step, as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lengthwise.simulator import Row

KEY = "# whole sequences, = parts of sequences that GPUs share, . waiting"


def gpu_lines(row: Row, gpus: Sequence[int], *, most_seconds: float, width: int = 60) -> list[str]:
    """Draw one line a GPU, `width` characters for `most_seconds`; a character is what the middle of its time holds."""
    middles = (np.arange(width) + 0.5) * most_seconds / width
    lines = []
    for gpu in gpus:
        drawn = np.where(middles < row.step_seconds[0], ".", " ")
        for each in row.stretches:
            if each.rank == gpu:
                drawn[(middles >= each.start) & (middles < each.end)] = "=" if each.kind == "ring" else "#"
        lines.append(f"GPU {gpu:>{len(str(max(gpus)))}} |{''.join(drawn.tolist()).rstrip()}|")
    return lines
