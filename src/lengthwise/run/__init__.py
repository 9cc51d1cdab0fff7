"""The engine: run a plan on every rank, reduce once, update, and check against one process."""

from lengthwise.core.environment import prepare_environment

prepare_environment()  # before transformers, which may ask for GPUs when it is imported
