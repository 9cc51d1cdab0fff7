"""What a plan means: its rules and features, the orders that follow from it, and each rank's transfers and blocks."""

from lengthwise.program.features import Feature as Feature
from lengthwise.program.features import refuse_unsupported as refuse_unsupported
from lengthwise.program.lower import MicrobatchProgram as MicrobatchProgram
from lengthwise.program.lower import all_end_alone as all_end_alone
from lengthwise.program.lower import last_on_all_ranks as last_on_all_ranks
from lengthwise.program.lower import lower_microbatch as lower_microbatch
from lengthwise.program.lower import lower_plan as lower_plan
from lengthwise.program.plan_rules import check_plan as check_plan
from lengthwise.program.records import ALL_HEADS as ALL_HEADS
from lengthwise.program.records import BlockTask as BlockTask
from lengthwise.program.records import Content as Content
from lengthwise.program.records import HeadRange as HeadRange
from lengthwise.program.records import MutualSpans as MutualSpans
from lengthwise.program.records import RankRound as RankRound
from lengthwise.program.records import Segment as Segment
from lengthwise.program.records import Transfer as Transfer
from lengthwise.program.ring_order import line_peers as line_peers
from lengthwise.program.ring_order import ring_order as ring_order
from lengthwise.program.spans import Mixing as Mixing
from lengthwise.program.spans import SequenceSpan as SequenceSpan
from lengthwise.program.spans import far_peers as far_peers
from lengthwise.program.spans import halo_moves as halo_moves
from lengthwise.program.spans import halo_round_of as halo_round_of
from lengthwise.program.spans import spans_of as spans_of
from lengthwise.program.spans import sweep_rounds_of as sweep_rounds_of
