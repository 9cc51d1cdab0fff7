"""Which layout fits: what a rank keeps of models from 1B to 70B on 8, 64 and 512 GPUs, and the tokens beside it.

    python benchmarks/layouts.py [--hardware h100] [--gpus 8,64,512]

By the memory formulas alone (`cost.memory`, whose states `benchmarks/sharding.py` holds to processes): states of AdamW
in bf16 with fp32 masters, and what is gathered of sharded parameters at most; tokens of a microbatch with each layer
computed again (`recompute: layer`), a tenth of the device left free.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from lengthwise.core.errors import ConfigError
from lengthwise.core.shape import ModelShape
from lengthwise.cost import Hardware, capacity_tokens, named_hardware, named_shape, step_memory
from lengthwise.report.figures import count
from pages import Findings, add_out

MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-14b", "qwen3-32b", "llama-3.1-70b")
LAYOUTS = ("zero1", "zero3")


def cell(shape: ModelShape, hardware: Hardware, ranks: int, shard: str) -> str:
    """Return the bytes of a rank and the tokens beside them, or that there is room for none."""
    memory = replace(step_memory(shape, hardware, ranks), shard=shard)
    held = f"{(memory.state_bytes() + memory.gathered_bytes()) / 1e9:.1f} GB"
    try:
        return f"{held}, {count(capacity_tokens(memory, hardware, recompute='layer'))}"
    except ConfigError:
        return f"{held}: does not fit"


def rows(hardware: Hardware, numbers: list[int]) -> Iterator[str]:
    """Yield the lines of the table."""
    heads = [f"{number} GPUs, {shard}" for number in numbers for shard in LAYOUTS]
    yield f"| model | parameters | {' | '.join(heads)} |"
    yield f"|{'---|' * (2 + len(heads))}"
    for name in MODELS:
        shape = named_shape(name)
        cells = [cell(shape, hardware, number, shard) for number in numbers for shard in LAYOUTS]
        yield f"| {name} | {count(shape.total_params)} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table, and write it into its page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--gpus", default="8,64,512")
    add_out(parser, "layouts")
    arguments = parser.parse_args()
    findings, hardware = Findings("layouts"), named_hardware(arguments.hardware)
    findings.add([f"On {hardware.name}, {hardware.device_bytes / 1e9:.0f} GB each:", ""])
    findings.add(rows(hardware, [int(each) for each in arguments.gpus.split(",")]))
    findings.sign("Modelled", "formulas, nothing was run; experts are not among these models")
    findings.write(arguments.out)


if __name__ == "__main__":
    main()
