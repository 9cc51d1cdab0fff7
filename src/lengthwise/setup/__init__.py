"""The layout of a model on a machine, and the memory of a step, from settings and sizes; no torch."""

from lengthwise.setup.resolve import (
    Machine,
    Setup,
    TrainedModel,
    lengths_of_a_batch,
    memory_of_settings,
    model_of_run,
    offload_of,
    resolve,
)

__all__ = [
    "Machine",
    "Setup",
    "TrainedModel",
    "lengths_of_a_batch",
    "memory_of_settings",
    "model_of_run",
    "offload_of",
    "resolve",
]
