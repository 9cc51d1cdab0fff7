"""Checkpoints: a folder with every rank's slices of parameters and optimizer states.

The folder is whole or absent, and is read at any number of ranks, under any layout.
"""

from lengthwise.checkpoint.manifest import Manifest as Manifest
from lengthwise.checkpoint.manifest import OptimizerState as OptimizerState
from lengthwise.checkpoint.manifest import RunManifest as RunManifest
from lengthwise.checkpoint.manifest import changed as changed
from lengthwise.checkpoint.manifest import dtype_of as dtype_of
from lengthwise.checkpoint.manifest import read_manifest as read_manifest
from lengthwise.checkpoint.manifest import read_run_manifest as read_run_manifest
from lengthwise.checkpoint.optimizer_state import state_of as state_of
from lengthwise.checkpoint.optimizer_state import take_state as take_state
from lengthwise.checkpoint.part import broken as broken
from lengthwise.checkpoint.part import differences as differences
from lengthwise.checkpoint.part import read_slices as read_slices
from lengthwise.checkpoint.part import read_state as read_state
from lengthwise.checkpoint.part import unfit as unfit
from lengthwise.checkpoint.saved_folder import CheckpointFolder as CheckpointFolder
from lengthwise.checkpoint.saved_folder import check_sizes as check_sizes
from lengthwise.checkpoint.whole_state import export_state as export_state
from lengthwise.checkpoint.whole_state import read_whole as read_whole
from lengthwise.checkpoint.writer import Ended as Ended
from lengthwise.checkpoint.writer import SliceWriter as SliceWriter
