"""Each switch of the run file alone, against the defaults: seconds of a step, memory, and that the losses stay.

A line more is an entry more of `SWITCHES`. The defaults run first and last, which shows the drift of the device.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
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
    ("compile: true", {"compile": True}),
    ("fused_layers: off", {"fused_layers": "off"}),
    ("fused_layers: liger", {"fused_layers": "liger"}),
    ("optimizer.fused: false", {"optimizer": {"fused": False}}),
    ("loss: whole", {"loss": "whole"}),
    ("recompute: layer", {"recompute": "layer"}),
    ("recompute: all_but_attention", {"recompute": "all_but_attention"}),
    ("defaults again", {}),
)
"""(name, run-file settings that are changed)."""
EXPERTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("mixture, experts: eager", {"experts": "eager"}),
    ("mixture, experts: grouped_mm", {"experts": "grouped_mm"}),
)
"""The same of a mixture of experts."""


def switches(sizes: Sizes, records: Records) -> None:
    """Write a row `switch` for each entry of `SWITCHES` and of `EXPERTS`."""
    for model, entries in ((sizes.switch_model, SWITCHES), (sizes.experts_model, EXPERTS)):
        with tempfile.TemporaryDirectory(prefix="lengthwise-switches-") as name:
            _switches_of(sizes, records, Path(name), model, entries)


def _switches_of(
    sizes: Sizes, records: Records, folder: Path, model: str, entries: Sequence[tuple[str, Mapping[str, Any]]]
) -> None:
    lengths, base = sizes.switch_batch.lengths(), None
    write_inputs(folder, model, [lengths] * sizes.switch_steps)
    for number, (label, changes) in enumerate(entries):
        settings = {
            "global_batch": {"sequences": len(lengths)},
            "steps": sizes.switch_steps,
            "capacity_tokens": max(lengths),
            "memory_check": False,
            **changes,
        }
        if changes.get("compile") and not sizes.step_compiled:
            settings["compile"] = False  # a test has no time for a compiler
        ran = train_run(sizes, folder, f"run-{number}", settings, ranks=1)
        if ran.refused is not None:
            records.add("switch", switch=label, refused=ran.refused)
            continue
        base = base or ran.losses[-1]
        records.add(
            "switch",
            switch=label,
            seconds=statistics.median(ran.seconds),
            spread=(max(ran.seconds) - min(ran.seconds)) / statistics.median(ran.seconds),
            tokens_per_second=ran.tokens_per_second,
            peak_bytes=ran.peak_bytes,
            last_loss=ran.losses[-1],
            loss_error=ran.losses[-1] / base - 1,
        )
