"""`lengthwise launch`: print the file that starts a run on several machines. It starts nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lengthwise.cli.launch_files import KINDS, TODO, Launched
from lengthwise.cli.options import named_alike
from lengthwise.core.errors import Collector
from lengthwise.core.names import counted
from lengthwise.core.sizes import read_whole

_MOST_NODES, _MOST_GPUS, _MOST_RESTARTS = 12_288, 1024, 1000
_NAME_CHARACTERS = 53  # of a job that Kubernetes makes pods of


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Print what starts a run on several machines: commands for torchrun, or a file for a cluster.

    The run file is read first, and all that is wrong with it told. Nothing is started.
    """

    config: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN.yaml")]
    """The run file, by the name that every machine has for it."""
    print: Annotated[
        Literal["torchrun", "slurm", "kubernetes", "skypilot"],
        tyro.conf.arg(metavar="torchrun|slurm|kubernetes|skypilot"),
    ]
    """Which: torchrun's command lines, a file for sbatch, a PyTorchJob, or a task of SkyPilot."""
    nodes: Annotated[int, tyro.conf.arg(metavar="N")] = 2
    """Machines."""
    gpus_per_node: Annotated[int, tyro.conf.arg(metavar="N")] = 8
    """Ranks of each; of a run with `device: cpu` processes."""
    max_restarts: int = 3
    """How often ranks that failed are started again, from the newest checkpoint."""

    def run(self) -> int:
        """Run the command; return the exit status."""
        from lengthwise.config import load_config

        problems = Collector()
        config = problems.attempt(lambda: load_config(self.config, []))
        for name, most, least in (
            ("nodes", _MOST_NODES, 1),
            ("gpus_per_node", _MOST_GPUS, 1),
            ("max_restarts", _MOST_RESTARTS, 0),
        ):
            problems.attempt(
                lambda name=name, most=most, least=least: read_whole(name, getattr(self, name), least=least, most=most)
            )
        problems.raise_all()
        assert config is not None, "it has no problem"
        name = re.sub(r"[^a-z0-9]+", "-", self.config.stem.lower()).strip("-")[:_NAME_CHARACTERS] or "run"
        launched = Launched(
            name=name,
            run_file=str(self.config),
            output=config.url or str(config.folder),
            nodes=self.nodes,
            gpus=self.gpus_per_node,
            max_restarts=self.max_restarts,
            on_cpu=config.device == "cpu",
        )
        text = KINDS[self.print](launched)
        sys.stdout.write(text)
        left = sum(TODO in line for line in text.splitlines())
        said = [f"{counted(left, 'line')} with {TODO}: yours to fill in"] if left else []
        if config.checkpoint is None:
            said.append("the run file has no `checkpoint`: a run that is started again begins anew")
        if said:
            sys.stdout.flush()
            for line in said:
                print(f"note: {line}", file=sys.stderr)
        return 0

    def names(self) -> Mapping[str, str]:
        """Map names of the library to what the user typed for them."""
        return named_alike("nodes gpus_per_node max_restarts")
