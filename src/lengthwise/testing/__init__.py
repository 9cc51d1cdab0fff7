"""What tests of this package, and of code built on it, stand on: builders, oracles, recorders, and real processes."""

from lengthwise.testing.oracles import dense_attention, relative_error
from lengthwise.testing.plans import draw_lengths, make_plan, random_plan, visible_pairs
from lengthwise.testing.ranks import run_ranks
from lengthwise.testing.recording import Call, RecordingTransport
from lengthwise.testing.sequences import make_batch

__all__ = [
    "Call",
    "RecordingTransport",
    "dense_attention",
    "draw_lengths",
    "make_batch",
    "make_plan",
    "random_plan",
    "relative_error",
    "run_ranks",
    "visible_pairs",
]
