"""Each switch of the run file alone, against the defaults: seconds of a step, memory, and that the losses stay.

A line more is an entry more of `SWITCHES`. The defaults run first and last, which shows the drift of the device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu.records import Records
from gpu.runs import train_run, write_inputs
from gpu.sizes import Sizes

SWITCHES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("defaults", {}),
    ("attention: flash2", {"attention": "flash2"}),
    ("attention: flash3", {"attention": "flash3"}),
    ("attention: flash4", {"attention": "flash4"}),
    ("attention: cudnn", {"attention": "cudnn"}),
    ("attention: efficient", {"attention": "efficient"}),
    ("optimizer.fused: false", {"optimizer": {"fused": False}}),
    ("loss: whole", {"loss": "whole"}),
    ("recompute: layer", {"recompute": "layer"}),
    ("recompute: all_but_attention", {"recompute": "all_but_attention"}),
    ("defaults again", {}),
)
"""(name, run-file settings that are changed)."""


def switches(sizes: Sizes, records: Records) -> None:
    """Write a row `switch` for each entry of `SWITCHES`."""
    lengths = sizes.switch_batch.lengths()
    batch = [lengths] * sizes.switch_steps
    base: float | None = None
    with tempfile.TemporaryDirectory(prefix="lengthwise-switches-") as name:
        folder = Path(name)
        write_inputs(folder, sizes.switch_model, batch)
        for number, (label, changes) in enumerate(SWITCHES):
            settings = {
                "global_batch": {"sequences": len(lengths)},
                "steps": sizes.switch_steps,
                "capacity_tokens": max(lengths),
                "memory_check": False,
                **changes,
            }
            ran = train_run(sizes, folder, f"run-{number}", settings, ranks=1)
            if ran.refused is not None:
                records.add("switch", switch=label, refused=ran.refused)
                continue
            base = base or ran.losses[-1]
            records.add(
                "switch",
                switch=label,
                seconds=sorted(ran.seconds)[len(ran.seconds) // 2],
                spread=(max(ran.seconds) - min(ran.seconds)) / min(ran.seconds),
                tokens_per_second=ran.tokens_per_second,
                peak_bytes=ran.peak_bytes,
                last_loss=ran.losses[-1],
                loss_error=ran.losses[-1] / base - 1,
            )
