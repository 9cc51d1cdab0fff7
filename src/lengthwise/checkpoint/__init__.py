"""What a run goes on from: each rank's slice of parameters and moments, in a folder that is whole or not there."""

from lengthwise.checkpoint.folder import CheckpointFolder as CheckpointFolder
from lengthwise.checkpoint.folder import check_sizes as check_sizes
from lengthwise.checkpoint.manifest import Manifest as Manifest
from lengthwise.checkpoint.manifest import changed as changed
from lengthwise.checkpoint.manifest import parameters_of as parameters_of
from lengthwise.checkpoint.manifest import read_manifest as read_manifest
from lengthwise.checkpoint.part import broken as broken
from lengthwise.checkpoint.part import differences as differences
from lengthwise.checkpoint.part import read_state as read_state
from lengthwise.checkpoint.part import take_digests as take_digests
from lengthwise.checkpoint.part import unfit as unfit
from lengthwise.checkpoint.part import write_part as write_part
