"""Selective offload: a share of a microbatch's activations leaves the device until its backward needs them."""

from lengthwise.offload import disk, pinned
from lengthwise.offload.disk import DiskStore
from lengthwise.offload.pinned import PinnedStore
from lengthwise.offload.saver import ActivationSaver, parameter_storages
from lengthwise.offload.store import ActivationStore

LEAVING_BYTES = {"host": pinned.LEAVING_BYTES, "disk": disk.LEAVING_BYTES}
"""Of what was put into a store, by its name in the run file: what may be on the device still."""

__all__ = [
    "LEAVING_BYTES",
    "ActivationSaver",
    "ActivationStore",
    "DiskStore",
    "PinnedStore",
    "parameter_storages",
]
