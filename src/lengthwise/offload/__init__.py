"""Selective offload: a share of a microbatch's activations leaves the device until its backward needs them."""

from lengthwise.offload import disk, pinned
from lengthwise.offload.disk import DiskStore
from lengthwise.offload.pinned import PinnedStore
from lengthwise.offload.saver import ActivationSaver, parameter_storages
from lengthwise.offload.store import ActivationStore

LEAVING_BYTES = {"host": pinned.LEAVING_BYTES, "disk": disk.LEAVING_BYTES}
"""By store, as a run file names it: largest number of bytes in it that may still be on the device."""

__all__ = ["LEAVING_BYTES", "ActivationSaver", "ActivationStore", "DiskStore", "PinnedStore", "parameter_storages"]
