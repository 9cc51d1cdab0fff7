"""Clock and watch over calls on GPUs: waiting is counted once, a peer that is gone is told of in time."""

import ctypes
import faulthandler
import multiprocessing
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
from lengthwise.comm.transfer_watch import Overdue, Posted, TransferWatch


class _Work:
    """A call that ends at some time of a device."""

    def __init__(self, device, ends):
        self.device, self.ends = device, ends

    def is_completed(self):
        return self.device.host >= self.ends


def _posted(device, ends, name="a ring"):
    (event := device.event()).record()
    return Posted(handle=_Work(device, ends), reached=event, phase=name, others="ranks 1")


def _told(overdue, device, until, poll=1.0):
    """Look until then as the thread of the watch does; return (when, phase) of what it tells, or None."""
    while device.host < until:
        device.host += max(0.0, min(poll, overdue.due_in(device.host)))
        if (late := overdue.look(device.host)) is not None:
            return device.host, late.phase
    return None


def test_calls_that_end_in_time_are_left_alone_however_far_the_host_is_ahead():
    device, overdue = FakeDevice(), Overdue(10.0)
    for _ in range(100):  # each ring takes 9 of the 10 seconds allowed, the last was posted 900 seconds before it ends
        device.give(4.0)
        overdue.add([_posted(device, ends := device.stream + 9.0)])
        device.wait_for(ends)
    device.give(500.0)  # long work of the device before the next
    overdue.add([_posted(device, ends=1805.0), _posted(device, ends=1814.0)])  # begun at once, one ends after the other
    assert (device.host, device.stream) == (0.0, 1800.0)
    assert _told(overdue, device, 1900.0) is None


@given(
    ahead=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 9)), max_size=20),
    timeout=st.floats(10, 100),
    poll=st.floats(0.1, 5),
)
def test_peer_that_is_gone_is_told_of_within_the_timeout_and_one_look(ahead, timeout, poll):
    device, overdue = FakeDevice(), Overdue(timeout)
    for computes, takes in ahead:
        device.give(computes)
        overdue.add([_posted(device, ends := device.stream + takes)])
        device.wait_for(ends)
    device.give(3.0)
    begins = device.stream
    overdue.add([_posted(device, float("inf"), "the ring of a peer that is gone"), _posted(device, float("inf"))])
    when, phase = _told(overdue, device, begins + 2 * timeout + 20, poll)
    assert phase == "the ring of a peer that is gone"
    assert begins + timeout - 1e-6 <= when <= begins + timeout + poll + 1e-6


class _Now:
    """A call, and an event, of a device that is the host itself."""

    def __init__(self, *, ends=True):
        self.ends = ends

    def is_completed(self):
        return self.ends

    def query(self):
        return True


def test_watch_tells_once_of_the_oldest_call_that_is_overdue():
    told = []
    watch, ends = TransferWatch(0.05, told.append, poll_seconds=0.01), _Now(ends=False)
    watch.add([ends], reached=_Now(), phase="step 0", others="ranks 1")
    ends.ends = True
    watch.add([_Now(ends=True), _Now(ends=False)], reached=_Now(), phase="step 1", others="ranks 1")
    watch.add([_Now(ends=False)], reached=_Now(), phase="step 2", others="ranks 2")
    watch._thread.join(10)
    assert [(posted.phase, posted.others) for posted in told] == [("step 1", "ranks 1")]


class _Frozen(_Now):
    def query(self):
        ctypes.PyDLL(None).sleep(60)  # as CUDA's may: it keeps Python's lock while it waits


def test_a_process_whose_watch_is_frozen_ends_with_all_stacks(capfd):
    def frozen():
        faulthandler.enable(2)
        watch = TransferWatch(0.3, print, poll_seconds=0.05, ends_frozen=True, grace_seconds=0.3)
        watch.add([_Now(ends=False)], reached=_Frozen(), phase="step 1", others="ranks 1")
        time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=frozen)
    process.start()
    process.join(40)
    said = capfd.readouterr().err
    assert process.exitcode == 1
    assert "Timeout (0:00:00.600000)!" in said
    assert "in query" in said


def test_the_watch_leaves_no_time_behind_and_its_thread_begins_on_its_device(monkeypatch):
    armed, begun = [], []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, **_: armed.append(seconds))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: armed.append(None))
    work = _Now(ends=False)
    begin = lambda: begun.append(threading.current_thread().name)  # noqa: E731
    watch = TransferWatch(5, [].append, poll_seconds=0.01, begin=begin, ends_frozen=True, grace_seconds=2)
    watch.add([work], reached=_Now(), phase="step 1", others="ranks 1")
    _until(lambda: 7 in armed)
    work.ends = True
    _until(lambda: armed[-1] is None)
    watch.add([_Now(ends=False)], reached=_Now(), phase="step 2", others="ranks 1")
    _until(lambda: armed[-1] == 7)
    watch.close()
    assert armed[-1] is None
    assert begun == ["watch"]


def _until(holds):
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


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
