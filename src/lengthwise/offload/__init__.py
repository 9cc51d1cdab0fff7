"""Selective offload: a share of a microbatch's activations leaves the device until its backward needs them."""

from lengthwise.offload.copies import CopyStore
from lengthwise.offload.disk import DiskStore
from lengthwise.offload.pinned import PinnedStore
from lengthwise.offload.saver import ActivationSaver, ActivationTotals, parameter_storages
from lengthwise.offload.store import ActivationStore, Stored

__all__ = [
    "ActivationSaver",
    "ActivationStore",
    "ActivationTotals",
    "CopyStore",
    "DiskStore",
    "PinnedStore",
    "Stored",
    "parameter_storages",
]
