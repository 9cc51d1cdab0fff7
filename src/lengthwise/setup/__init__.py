"""The layout of a model on a machine, and the memory of a step, from settings and sizes; no torch."""

from lengthwise.setup.resolve import Machine as Machine
from lengthwise.setup.resolve import Setup as Setup
from lengthwise.setup.resolve import TrainedModel as TrainedModel
from lengthwise.setup.resolve import lengths_of_a_batch as lengths_of_a_batch
from lengthwise.setup.resolve import memory_of_settings as memory_of_settings
from lengthwise.setup.resolve import model_of_run as model_of_run
from lengthwise.setup.resolve import offload_of as offload_of
from lengthwise.setup.resolve import resolve as resolve
