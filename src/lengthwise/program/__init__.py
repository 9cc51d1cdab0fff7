"""What a plan means: its rules and features, the orders it implies, and what each rank does in rounds and blocks."""

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
from lengthwise.program.ring_order import interval_microbatch, ring_order
from lengthwise.program.stage_clocks import stage_clocks
from lengthwise.program.stage_order import stage_order

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
    "interval_microbatch",
    "last_on_all_ranks",
    "lower_microbatch",
    "lower_plan",
    "refuse_unsupported",
    "ring_order",
    "stage_clocks",
    "stage_order",
]
