"""Settings, a model's shape and a machine to what trains: how parameters lie, what a step holds, what plans it."""

from lengthwise.setup.resolve import Machine, Setup, TrainedModel, memory_of_settings, model_of_run, offload_of, resolve

__all__ = ["Machine", "Setup", "TrainedModel", "memory_of_settings", "model_of_run", "offload_of", "resolve"]
