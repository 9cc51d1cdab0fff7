"""The answer of a simulation: one sentence, a table of five rows in 80 columns, and the same as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lengthwise.report.figures import count, seconds
from lengthwise.simulator import MODEL_ERROR, gain_over
from lengthwise.simulator.ways import BY_WORK, LAYOUTS, OURS, Answer, WayRow, WaySettings

_NAME, _STEP, _RATIO, _MEMORY = 21, 9, 7, 7  # columns of the table; settings take the rest
_MOST = 80
_KERNELS = {
    "cudnn": "cuDNN (blocks from 32K) and FlashAttention-2 (packs, shorter blocks)",
    "flash2": "FlashAttention-2",
    "flash3": "FlashAttention-3",
}
_AGAIN = {"none": (), "layer": ("recompute all",), "all_but_attention": ("recompute MLP",)}
HEADS = ("", "step", "ratio", "memory", "settings")


def answer_sentence(answer: Answer, unit: str = "tokens") -> str:
    """Say what a step takes with Lengthwise and the best other, if they can be told apart; `unit`: of lengths."""
    ours, other = answer.ours, answer.best_other
    counted_in = "bytes" if unit == "bytes" else "tokens"
    where = f"{answer.devices} x {answer.hardware}, {tokens_text(answer.batch_tokens)} {counted_in} a step, "
    where += f"longest sequence {tokens_text(answer.longest)}"
    if not ours.step_seconds and other is None:
        return f"{where}: no method here can hold these sequences; the table gives the reasons."
    if not ours.step_seconds:
        assert other is not None, "one of the two was checked to fit"
        return f"{where}: Lengthwise cannot hold these sequences; {other.name} takes {seconds(other.mean_seconds)}."
    asks = " and `offload`" * (not answer.auto)
    took = f"{where}: {seconds(ours.mean_seconds)} with {OURS}{asks}"
    if other is None:
        return f"{took}; FSDP2 cannot hold these sequences here."
    gain = gain_over(other.step_seconds, ours.step_seconds)
    best = f"the best otherwise takes {seconds(other.mean_seconds)} ({other.name})"
    if gain.is_equal:
        return f"{took}; {best}: equal within the model's {100 * MODEL_ERROR:.0f} %."
    if gain.ratio > 1:
        return f"{took}; {best}: {gain.ratio:.2f}x as long."
    return f"{took}; {best}: no gain, Lengthwise takes {1 / gain.ratio:.2f}x as long."


def tokens_text(tokens: int) -> str:
    """Write a number of tokens near a round binary one as that one: 1M, 64K; others in three digits."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens >= size:
            value = tokens / size
            return f"{value:.0f}{unit}" if abs(value - round(value)) < 0.02 * value else f"{value:.1f}{unit}"
    return str(tokens)


def answer_rows(answer: Answer) -> list[tuple[str, ...]]:
    """Write one row a way, of `HEADS`: its step over ours, memory of the fullest device; or name and why it is none."""
    ours = answer.ours.mean_seconds if answer.ours.step_seconds else None
    return [_cells(row, ours) for row in answer.rows]


def answer_table(answer: Answer) -> str:
    """Write the table, at most 80 columns wide."""
    return "\n".join(_line(row) for row in (HEADS, *answer_rows(answer)))


def _cells(row: WayRow, ours: float | None) -> tuple[str, ...]:
    if not row.step_seconds or row.settings is None:
        return row.name, f"does not fit: {row.refusal}"
    mean = row.mean_seconds
    ratio = f"{mean / ours:.2f}x" if ours else ""
    memory = f"{row.memory_bytes / 1e9:.0f} GB"
    return row.name, seconds(mean), ratio, memory, settings_text(row.settings)


def _line(cells: tuple[str, ...]) -> str:
    if len(cells) == 2:
        line = f"{cells[0]:<{_NAME}}{cells[1]}"
        return line if len(line) <= _MOST else line.replace("longest sequence", "longest")
    name, step, ratio, memory, settings = cells
    return f"{name:<{_NAME}}{step:>{_STEP}}{ratio:>{_RATIO}}{memory:>{_MEMORY}}  {settings}".rstrip()


def settings_text(settings: WaySettings) -> str:
    """Say in a few words what a way was run with."""
    words = [settings.layout] if settings.layout else []
    if settings.size is not None:
        words.append(f"{settings.size} a GPU{', by length' * bool(settings.by_length)}")
    elif settings.degree is not None and settings.degree > 1:
        words.append(f"rings of {settings.degree}")
    elif not settings.layout:
        words.append(f"packs of {count(settings.capacity_tokens)}")
    return ", ".join([*words, *_AGAIN[settings.recompute], *(["offload"] if settings.offloads else [])])


def answer_notes(answer: Answer) -> list[str]:
    """Say what the figures are, and what they leave open."""
    kernel = _KERNELS.get(answer.kernel, answer.kernel)
    notes = [f"Simulated, not measured{f'; attention at the speed of {kernel}' * bool(kernel)}."]
    if any(row.name == BY_WORK and row.step_seconds for row in answer.rows):
        how = "batches sorted by work, so that like ones run at once; no trainer does that by itself"
        notes.append(f"{BY_WORK}: {how}.")
    rings = [row.name for row in answer.rows[:-1] if row.settings is not None and (row.settings.degree or 1) > 1]
    if rings and not answer.only_attends:
        how = "priced as if a ring could cut layers with states or convolutions; no trainer on FSDP2 does that"
        notes.append(f"{' and '.join(rings)}: {how}.")
    took = [
        f"{row.settings.layout} {seconds(row.mean_seconds)}{' (with offload)' * row.settings.offloads}"
        for row in answer.layouts
        if row.settings is not None
    ]
    if len(answer.layouts) > 1 and took:
        takes = f"takes {answer.auto}" if answer.auto else "finds room for none without offload"
        notes.append(f"Layouts of Lengthwise: {', '.join(took)}; `shard: auto` {takes}.")
    return notes


def answer_json(answer: Answer, sentence: str) -> dict[str, Any]:
    """Write all of it; times in seconds, one a batch."""
    return {
        "sentence": sentence,
        "kernel": answer.kernel,
        "layouts": {
            name: list(row.step_seconds) or row.refusal for name, row in zip(LAYOUTS, answer.layouts, strict=False)
        },
        "auto": answer.auto,
        "rows": [
            {
                "name": row.name,
                "step_seconds": list(row.step_seconds),
                "memory_bytes": row.memory_bytes,
                "settings": None if row.settings is None else asdict(row.settings),
                "refusal": row.refusal,
            }
            for row in answer.rows
        ],
    }
