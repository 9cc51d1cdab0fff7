"""What tests of this package, and of code built on it, stand on: builders, oracles, recorders, and real processes."""

from lengthwise.testing.families import Difference, build_pair, family_difference
from lengthwise.testing.live import LiveBytes
from lengthwise.testing.oracles import dense_attention, relative_error, rounding_floor
from lengthwise.testing.plans import draw_lengths, make_plan, random_plan, visible_pairs
from lengthwise.testing.ranks import run_ranks
from lengthwise.testing.recording import Call, RecordingTransport
from lengthwise.testing.sequences import make_batch
from lengthwise.testing.tiny import MODEL_TYPES, VARIANTS, tiny_family_config

__all__ = [
    "MODEL_TYPES",
    "VARIANTS",
    "Call",
    "Difference",
    "LiveBytes",
    "RecordingTransport",
    "build_pair",
    "dense_attention",
    "draw_lengths",
    "family_difference",
    "make_batch",
    "make_plan",
    "random_plan",
    "relative_error",
    "rounding_floor",
    "run_ranks",
    "tiny_family_config",
    "visible_pairs",
]
