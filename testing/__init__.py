"""What the tests and the benchmarks stand on: builders, oracles, recorders, and real processes; not installed."""

from lengthwise.engine.byte_watch import LiveBytes
from testing.families import Difference, build_pair, enliven, family_difference, tiny_model
from testing.oracles import dense_attention, relative_error, rounding_floor
from testing.plans import draw_lengths, make_plan, random_plan
from testing.ranks import run_ranks
from testing.recording import Call, RecordingTransport
from testing.sequences import make_batch
from testing.steps import run_step
from testing.stores import CountingStore, DelayedStore
from testing.tiny import MODEL_TYPES, SIZES, VARIANTS, put_forwards, tiny_family_config
from testing.towers import TOWER_PAIRS, tiny_tower_config

__all__ = [
    "MODEL_TYPES", "SIZES", "TOWER_PAIRS", "VARIANTS", "Call", "CountingStore", "DelayedStore", "Difference",
    "LiveBytes", "RecordingTransport", "build_pair", "dense_attention", "draw_lengths", "enliven",
    "family_difference", "make_batch", "make_plan", "put_forwards", "random_plan", "relative_error", "rounding_floor",
    "run_ranks", "run_step", "tiny_family_config", "tiny_model", "tiny_tower_config",
]  # fmt: skip
