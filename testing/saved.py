"""A session's state, whole: saved as a folder of slices and exported, as users do."""

import shutil
import tempfile
from pathlib import Path

import torch

from lengthwise.checkpoint import export_state
from lengthwise.comm import from_first


def new_folder(session):
    """Make a folder in the machine's folder for such; return its path, the same on all ranks. Collective."""
    return Path(from_first(session._transport, tempfile.mkdtemp))


def whole_state(session):
    """Return on rank 0 the exported state, weights by their names in the user's model; {} on others. Collective."""
    folder = new_folder(session)
    session.save(folder / "state")
    if session.rank:
        return {}
    export_state(folder / "state", folder / "optimizer.pt")
    found = torch.load(folder / "optimizer.pt", weights_only=True)
    shutil.rmtree(folder)
    prefix = "base_model.model." if hasattr(session.model, "peft_config") else ""
    return {**found, "master_weights": {prefix + name: each for name, each in found["master_weights"].items()}}
