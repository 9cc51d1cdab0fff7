"""Tables of one GPU, each a function of `Sizes` that writes rows as it finds them; run by `gpu_check.py`."""

from lengthwise.core.environment import prepare_environment

prepare_environment()  # before transformers, which may ask for GPUs when it is imported
