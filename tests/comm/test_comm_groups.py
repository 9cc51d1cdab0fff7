"""What NCCL is asked for; the groups themselves are made in `test_comm_gloo`, with gloo in NCCL's place."""

from datetime import timedelta

import pytest
from nccl_options import NcclOptions

from lengthwise.comm.groups import transfer_options


def test_transfers_have_streams_of_high_priority_and_few_thread_blocks():
    options = transfer_options(timedelta(seconds=3), NcclOptions, {})
    found = (options.is_high_priority_stream, options.config.max_ctas, options._timeout)
    assert found == (True, 8, timedelta(seconds=3))
    assert options.config.min_ctas == NcclOptions().config.min_ctas


@pytest.mark.parametrize("name", ["NCCL_MAX_CTAS", "NCCL_MIN_CTAS"])
def test_thread_blocks_that_the_environment_asks_for_are_left(name):
    options = transfer_options(timedelta(seconds=3), NcclOptions, {name: "16"})
    assert (options.is_high_priority_stream, options.config.max_ctas) == (True, -1)
