"""What NCCL is asked for; the groups themselves are made in `test_comm_gloo`, with gloo in NCCL's place."""

from datetime import timedelta

import pytest
from nccl_options import NcclOptions

from lengthwise.comm.groups import DEFAULTS, MOST_OPERATIONS, nccl_options, refuse_large, set_defaults
from lengthwise.core.errors import PlanError


@pytest.mark.parametrize("name", ["NCCL_MAX_CTAS", "NCCL_MIN_CTAS"])
@pytest.mark.parametrize("for_transfers", [True, False])
def test_thread_blocks_that_the_environment_asks_for_are_left(name, for_transfers):
    options = nccl_options(timedelta(seconds=3), NcclOptions, {name: "16"}, for_transfers=for_transfers)
    assert (options.is_high_priority_stream, options.config.max_ctas) == (for_transfers, -1)


def test_variables_of_nccl_are_set_where_nothing_is():
    environment = {"NCCL_NCHANNELS_PER_NET_PEER": "2", "PATH": "/bin"}
    set_defaults(environment)
    assert environment == {**DEFAULTS, "NCCL_NCHANNELS_PER_NET_PEER": "2", "PATH": "/bin"}


def test_a_grouped_call_that_nccl_would_cut_is_refused():
    refuse_large(MOST_OPERATIONS, where="rank 3, step 1")
    with pytest.raises(
        PlanError, match="rank 3, step 1: expected at most 64 messages in one grouped call of NCCL; got 65"
    ):
        refuse_large(MOST_OPERATIONS + 1, where="rank 3, step 1")
