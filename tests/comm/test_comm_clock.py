"""Waiting on a device is what its stream waits, counted once; what the host takes to post is none of it."""

import threading
import time
from contextlib import contextmanager

import pytest
import torch
from fake_device import FakeDevice
from hypothesis import given
from hypothesis import strategies as st
from testing import run_ranks

from lengthwise.comm.clock import Clock, Spent

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SECONDS = st.floats(0, 10)


@contextmanager
def faked():
    with pytest.MonkeyPatch.context() as patch:
        device = FakeDevice()
        patch.setattr(torch.cuda, "Event", device.event)
        patch.setattr(time, "perf_counter", lambda: device.host)
        yield device


@pytest.fixture
def device():
    with faked() as device:
        yield device


def test_interval_ends_when_the_device_is_done_and_begins_when_it_has_done_the_step_before(device):
    clock = Clock()
    device.give(4.0)  # of the update before: the host is ahead
    with clock.waiting(on_stream=True):
        device.wait_for(6.0)
    interval = clock.start(CUDA)
    assert device.reads == 0, "the host does not wait to begin"
    device.give(7.0)
    assert device.host == 0
    spent = interval.stop()
    assert (spent.seconds, spent.busy_seconds, device.host) == (7.0, 7.0, 13.0)
    assert device.reads == 1, "the host waits once"


def test_waiting_in_collectives_is_told_apart(device):
    """Parameters that still arrive in a rank's first forward are no transfers of a ring."""
    clock = Clock()
    with clock.waiting(on_stream=True, in_collective=True):
        device.wait_for(5.0)
    interval = clock.start(CUDA)
    with clock.waiting(on_stream=True, in_collective=True):
        device.wait_for(7.0)
    with clock.waiting(on_stream=True), clock.waiting(in_collective=True):
        device.wait_for(10.0)
    with clock.waiting(in_collective=True):
        device.host += 0.5
    spent = interval.stop()
    assert spent == Spent(seconds=5.0, transfer_seconds=3.0, collective_seconds=2.5)
    assert (spent.waited_seconds, clock.waited_seconds) == (5.5, 10.5)
    assert spent.busy_seconds == 0.0


@given(
    st.lists(st.tuples(st.sampled_from(["compute", "post", "wait", "host"]), SECONDS), max_size=30), st.booleans()
)  # fmt: skip
def test_busy_and_waiting_are_what_the_stream_did(does, on_host):
    """Whatever the host posts, and whenever: the stream's seconds are computing, waiting, or nothing to do."""
    with faked() as device:  # hypothesis wants a new one for every example
        device.give(1.5)
        clock, computed, waited, arrives = Clock(), 0.0, 0.0, 0.0
        interval, begun = clock.start(CUDA), device.stream
        for what, seconds in does:
            if what == "compute":
                device.give(seconds)
                computed += seconds
            elif what == "post":
                device.host += 0.01
                arrives = device.give() + seconds
            elif what == "host":
                device.host += seconds
            else:
                waited += max(0.0, arrives - device.give())
                with clock.waiting(on_stream=True):
                    device.wait_for(arrives)
            if on_host and what == "wait":
                device.host = device.give()
        spent = interval.stop()
        assert spent.seconds == pytest.approx(device.stream - begun)
        assert spent.waited_seconds == pytest.approx(waited)
        assert 0 <= spent.waited_seconds <= spent.seconds + 1e-9
        assert spent.busy_seconds >= computed - 1e-9


def test_transports_tell_waiting_for_a_transfer_from_waiting_in_a_collective():
    def work(t):
        interval, event = t.clock.start(CPU), threading.Event()
        event.wait(0.15 if t.rank else 0.0)
        t.exchange([(torch.ones(2), 1 - t.rank)], [(torch.zeros(2), 1 - t.rank)]).wait()
        event.wait(0.3 if t.rank else 0.0)
        t.all_gather_async(torch.zeros(4), torch.ones(2)).wait()
        return interval.stop()

    spent, _ = run_ranks(work, 2)
    assert spent.transfer_seconds > 0.1
    assert spent.collective_seconds > 0.25
