"""What a plan means: its rules and features, the orders that follow from it, and each rank's transfers and blocks."""

from lengthwise.program.features import Feature, features_of, refuse_unsupported
from lengthwise.program.lower import MicrobatchProgram, all_end_alone, last_on_all_ranks, lower_microbatch, lower_plan
from lengthwise.program.plan_rules import check_plan
from lengthwise.program.records import (
    ALL_HEADS,
    BlockTask,
    Content,
    HeadRange,
    MutualSpans,
    RankRound,
    Segment,
    Transfer,
)
from lengthwise.program.ring_order import line_peers, ring_order
from lengthwise.program.spans import (
    Mixing,
    SequenceSpan,
    far_peers,
    halo_moves,
    halo_round_of,
    spans_of,
    sweep_rounds_of,
)

__all__ = [
    "ALL_HEADS",
    "BlockTask",
    "Content",
    "Feature",
    "HeadRange",
    "MicrobatchProgram",
    "Mixing",
    "MutualSpans",
    "RankRound",
    "Segment",
    "SequenceSpan",
    "Transfer",
    "all_end_alone",
    "check_plan",
    "far_peers",
    "features_of",
    "halo_moves",
    "halo_round_of",
    "last_on_all_ranks",
    "line_peers",
    "lower_microbatch",
    "lower_plan",
    "refuse_unsupported",
    "ring_order",
    "spans_of",
    "sweep_rounds_of",
]
