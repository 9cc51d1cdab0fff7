"""A run file on a session: `lengthwise train` and `verify`, the launcher, the run's folder and its checkpoints."""

from lengthwise.core.environment import prepare_environment

prepare_environment()  # before transformers, which may ask for GPUs when it is imported
