"""Hold every causal-LM class of the installed transformers against plain Hugging Face: `make families`.

    python benchmarks/families.py [--out docs/families.md] [model_type ...]

Each tiny model runs in a process of its own (some allocate gigabytes whatever their config says): loss and every
gradient of eight documents, packed and cut over rings of three ranks, against the plain model one document at a time.
Families that are not listed in `lengthwise.models.FAMILIES` are tried too, past the refusal, to show what the layers
themselves refuse: an unlisted family that differs without being stopped is why the list exists.
"""

from __future__ import annotations

import argparse
import datetime
import os
import resource
import signal
import sys
import warnings
from pathlib import Path

import torch
import transformers

from lengthwise.core.errors import LengthwiseError
from lengthwise.core.shape import Cluster
from lengthwise.cost import CostModel
from lengthwise.models import FAMILIES
from lengthwise.planner import plan_step
from lengthwise.testing import MODEL_TYPES, build_pair, family_difference, tiny_family_config

LENGTHS, RANKS, MEMORY_BYTES, SECONDS = (1, 57, 2, 40, 5, 31, 11, 8), 3, 6 << 30, 60


def try_family(model_type: str) -> str:
    """Return the rest of the family's row."""
    try:
        config = tiny_family_config(model_type)
        pair = build_pair(model_type, config)
    except Exception as error:  # noqa: BLE001 - whatever keeps a tiny model from being made
        return f"not tried | | | cannot be made tiny: {_short(error)}"
    cluster = Cluster(ranks=RANKS, capacity_tokens=-(-max(LENGTHS) // RANKS) + 1)
    plan = plan_step(LENGTHS, cluster, CostModel(quadratic_seconds=1.0, linear_seconds=100.0), layers=2)
    try:
        fp64, fp32 = (family_difference(pair, plan, LENGTHS, precision=precision) for precision in ("fp64", "fp32"))
    except LengthwiseError as error:
        return f"refused by a layer | | | {_short(error)}"
    except Exception as error:  # noqa: BLE001 - plain Hugging Face itself may not run this config
        return f"not tried | | | {type(error).__name__}: {_short(error)}"
    equal = fp64.loss <= 1e-13 and fp64.gradient <= 1e-12
    kinds = ", ".join(sorted(set(getattr(config, "layer_types", None) or ())))
    verdict = "equal" if equal else "DIFFERS"
    return f"{verdict} | {fp64.loss:.0e} / {fp64.gradient:.0e} | {fp32.loss:.0e} / {fp32.gradient:.0e} | {kinds}"


def in_a_process(model_type: str) -> str:
    """Run `try_family` where it can do no harm."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        signal.alarm(SECONDS)
        os.write(theirs, try_family(model_type).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        row = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return row or f"not tried | | | its process ended with status {status}"


def _short(error: Exception) -> str:
    text = " ".join(str(getattr(error, "got", error)).split()) or type(error).__name__
    return text[:100].replace("|", "/")


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description="every causal-LM class against plain Hugging Face")
    parser.add_argument("--out", type=Path)
    parser.add_argument("model_types", nargs="*", default=MODEL_TYPES)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for model_type in arguments.model_types:
        listed = "yes" if model_type in FAMILIES else "refused"
        rows.append(f"| {model_type} | {listed} | {in_a_process(model_type)} |")
        print(rows[-1], file=sys.stderr if arguments.out else sys.stdout, flush=True)
    if arguments.out:
        arguments.out.write_text(page(rows), encoding="utf-8")


def page(rows: list[str]) -> str:
    """Put the table on its page."""
    versions = f"transformers {transformers.__version__} and torch {torch.__version__}"
    head = f"""# Model families

Made by `make families` on {datetime.date.today()} with {versions}, on CPU.

Differences are relative, loss / worst gradient (L2 a tensor), of a tiny random model: eight documents packed and cut
over rings on {RANKS} ranks, against the plain Hugging Face model one document at a time. *Trained: yes* families are
held to this by the tests (fp64: 1e-13 / 1e-12). All others are refused by name before a run starts; what came out when
they were tried past that refusal is shown, because it is why they are refused. `DIFFERS` below about 1e-6 in a family
that is not trained is its own fp32 arithmetic, not a proved mistake.

| family | trained | when tried | fp64 | fp32 | layers, or reason |
|---|---|---|---|---|---|
"""
    return head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
