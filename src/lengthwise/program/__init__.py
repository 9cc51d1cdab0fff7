"""What a plan means: its rules and features, the orders it implies, and what each rank does in rounds and blocks."""

from lengthwise.program.check import check_plan
from lengthwise.program.features import Feature, features_of, refuse_unsupported, trains
from lengthwise.program.lower import MicrobatchProgram, all_end_alone, last_on_all_ranks, lower_microbatch, lower_plan
from lengthwise.program.records import (
    ALL_HEADS,
    BlockTask,
    Content,
    HeadRange,
    RankRound,
    Segment,
    Transfer,
)
from lengthwise.program.ring_order import far_peers, line_peers, ring_order

__all__ = [
    "ALL_HEADS",
    "BlockTask",
    "Content",
    "Feature",
    "HeadRange",
    "MicrobatchProgram",
    "RankRound",
    "Segment",
    "Transfer",
    "all_end_alone",
    "check_plan",
    "far_peers",
    "features_of",
    "last_on_all_ranks",
    "line_peers",
    "lower_microbatch",
    "lower_plan",
    "refuse_unsupported",
    "ring_order",
    "trains",
]
