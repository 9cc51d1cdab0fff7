"""Plan -> what each rank does: shards of sequences, then rounds of transfers and the block tasks they hide behind."""

from lengthwise.program.check import check_plan
from lengthwise.program.features import Feature, features_of, refuse_unsupported
from lengthwise.program.lower import (
    MicrobatchProgram,
    last_on_all_ranks,
    lower_microbatch,
    lower_plan,
)
from lengthwise.program.order import StrictMatcher, check_order
from lengthwise.program.records import BlockTask, Round, Segment, Transfer
from lengthwise.program.ring_order import ring_order

__all__ = [
    "BlockTask",
    "Feature",
    "MicrobatchProgram",
    "Round",
    "Segment",
    "StrictMatcher",
    "Transfer",
    "check_order",
    "check_plan",
    "features_of",
    "last_on_all_ranks",
    "lower_microbatch",
    "lower_plan",
    "refuse_unsupported",
    "ring_order",
]
