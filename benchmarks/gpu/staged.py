"""Ranks that share the one GPU, with rings forced: sequences of several capacities, losses beside those of one rank.

Transfers go through host memory, so this shows that rings are right on the device, not that they are fast.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from gpu.records import Records
from gpu.runs import train_run, write_inputs
from gpu.sizes import Sizes


def staged(sizes: Sizes, records: Records) -> None:
    """Write a row `staged` for each number of ranks; `loss_error` is the largest difference from one rank's losses."""
    lengths = [sizes.staged_tokens, *sizes.staged_short]
    with tempfile.TemporaryDirectory(prefix="lengthwise-staged-") as name:
        folder = Path(name)
        write_inputs(folder, sizes.staged_model, [lengths] * sizes.staged_steps)
        alone = None
        for ranks in (1, *sizes.staged_ranks):
            room = max(sizes.staged_capacity_tokens, -(-sizes.staged_tokens // ranks))
            settings = {
                "global_batch": {"sequences": len(lengths)},
                "steps": sizes.staged_steps,
                "capacity_tokens": sum(lengths) if ranks == 1 else room,
                "recompute": "layer" if ranks == 1 else "none",
                "heads": "off",
            }
            ran = train_run(sizes, folder, f"ranks-{ranks}", settings, ranks=ranks)
            if ran.refused is not None:
                records.add("staged", ranks=ranks, refused=ran.refused)
                continue
            alone = alone or ran
            pairs = zip(ran.losses, alone.losses, strict=True)
            records.add(
                "staged",
                ranks=ranks,
                longest_tokens=max(lengths),
                capacity_tokens=settings["capacity_tokens"],
                ring_token_share=ran.ring_token_ratio,
                seconds=sorted(ran.seconds)[len(ran.seconds) // 2],
                peak_bytes=ran.peak_bytes,
                last_loss=ran.losses[-1],
                loss_error=max(abs(a / b - 1) for a, b in pairs),
            )
