"""Is a model with Liger's fused norms, RoPE and MLPs the model? Loss and gradients against plain Hugging Face.

    python benchmarks/fused_layers.py [--precision fp32] [--out docs/benchmarks/fused_layers.md] [family ...]

Needs liger-kernel (pip install 'lengthwise[gpu]') and TRITON_INTERPRET=1 in the environment, but no GPU: Triton's
interpreter runs Liger's kernels on the CPU, slowly; three things that it lacks are put in here. Tiny models of each
family that `models.fused_layers` lists, two documents in a pack.
"""

from __future__ import annotations

import argparse
import importlib
import os
from typing import Any

from testing import build_pair, family_difference, make_plan, tiny_family_config

from lengthwise.core.plan import Piece
from lengthwise.models.fused_layers import FUSED_FAMILIES, fuse_layers, installed_liger, liger_kernels
from pages import Findings, add_out

LENGTHS = (9, 5)


def complete_the_interpreter() -> None:
    """Give Triton's interpreter numbers as arguments, and the two functions of CUDA that Liger takes."""
    import numpy as np

    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    convert = interpreter._implicit_cvt

    def with_numbers(value: object) -> object:
        if not isinstance(value, float):
            return convert(value)
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), language.float32)
        return language.tensor(handle, language.float32)

    norms: Any = importlib.import_module("liger_kernel.ops.rms_norm")
    gates: Any = importlib.import_module("liger_kernel.ops.geglu")
    interpreter._implicit_cvt = with_numbers
    norms.rsqrt = lambda x: language.rsqrt(x)  # looked up late: the interpreter exchanges it while a kernel runs
    gates.tanh = lambda x: 2 * language.sigmoid(2 * x) - 1


def row(family: str, precision: str) -> str:
    """Return the row of a family: what was exchanged, and the largest differences without and with it."""
    pair = build_pair(family, tiny_family_config(family))
    config: Any = pair["planned"].config
    plan = make_plan(1, LENGTHS, [Piece(ranks=(0,), sequences=(0, 1))], layers=config.num_hidden_layers)
    cells = []
    for exchange in (False, True):
        said = fuse_layers(pair["planned"], liger_kernels()) if exchange else ""
        found = family_difference(pair, plan, LENGTHS, precision=precision)
        cells += [f"{found.loss:.0e}", f"{found.gradient:.0e}"]
    return f"| {family} | {said} | {' | '.join(cells)} |"


def main() -> None:
    """Print one row a family, and write them into a page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FUSED_FAMILIES), metavar="family")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    add_out(parser, "fused_layers")
    options, findings = parser.parse_args(), Findings("fused_layers")
    version = installed_liger()
    if version is None:
        raise SystemExit("fused_layers: expected liger-kernel; got none. Run: pip install 'lengthwise[gpu]'")
    if os.environ.get("TRITON_INTERPRET") != "1":  # triton reads it when it is imported
        raise SystemExit("fused_layers: expected TRITON_INTERPRET=1 in the environment. Run it with that.")
    complete_the_interpreter()
    findings.add(
        [
            "| family | exchanged | loss without | gradient without | loss with | gradient with |",
            "|---|---|---|---|---|---|",
        ]
    )
    for family in options.families:
        findings.add([row(family, options.precision)])
    findings.sign("Measured", f"liger-kernel {version} in Triton's interpreter on the CPU, {options.precision}")
    findings.write(options.out)


if __name__ == "__main__":
    main()
