"""A transport inside one process, one thread a rank, as strict as NCCL and stricter than gloo.

Real tensors move by the rules of `testing.order.StrictMatcher`: groups of a rank run one after the other, messages
match in the order posted, in shape and dtype, and a collective needs the same call on all ranks. When every rank waits
and nothing can move, all of them raise at once and name what they wait in: a hang becomes a failed test. A rank with
collectives under way may post no transfer, and no collective with transfers under way, even where it would go well.
Only collectives with a key may have transfers beside them: keys must increase on each rank, and be the same on all.
Messages need an edge that `connect` has met, and collectives with a key one without before them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from lengthwise.comm.clock import Clock
from lengthwise.comm.transport import Done, Key, Message, Pending, Transport
from lengthwise.core.errors import TransferError
from testing.order import Group, Operation, StrictMatcher


class StrictWorld:
    """The meeting place of `world_size` threads."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._matcher = StrictMatcher(world_size)
        self._moved = threading.Condition()
        self._waiting: dict[int, Group] = {}
        self._gone: set[int] = set()
        self._failure: str | None = None

    def run(self, work: Callable[[StrictTransport], object]) -> list[object]:
        """Call `work` once a rank, each in a thread of its own, and return what they returned, by rank.

        Raises:
            The first error of the lowest rank that failed for a reason of its own.
        """
        results: list[object] = [None] * self.world_size
        errors: dict[int, BaseException] = {}

        def target(rank: int) -> None:
            try:
                results[rank] = work(StrictTransport(self, rank))
            except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
                errors[rank] = error
            finally:
                self._leave(rank)

        threads = [threading.Thread(target=target, args=(rank,), daemon=True) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:  # a rank that failed by itself explains the others, which only miss it
            raise min(errors.items(), key=lambda item: (isinstance(item[1], TransferError), item[0]))[1]
        return results

    def post(self, rank: int, label: str, operations: Sequence[Operation], *, order: str) -> Group:
        """Queue a group of `rank` and move whatever can be moved; order: whose edges its messages need."""
        with self._moved:
            group = self._matcher.post(rank, label, operations, order=order)
            try:
                for senders, receivers in self._matcher.progress():
                    _move(senders, receivers)
            except Exception as error:  # noqa: BLE001 - every rank hears of it where it waits
                self._failure = self._failure or str(error)
            self._moved.notify_all()
            return group

    def meet(self, rank: int, peers: Sequence[int], *, order: str) -> list[int]:
        """Return those of `peers` that `rank` has not met before in an order of transfers."""
        with self._moved:
            return self._matcher.meet(rank, peers, order=order)

    def fail(self, reason: str) -> None:
        """Let every rank that waits raise, with this reason."""
        with self._moved:
            self._failure = self._failure or reason
            self._moved.notify_all()

    def wait(self, rank: int, group: Group) -> None:
        """Block until `group` is complete."""
        with self._moved:
            self._waiting[rank] = group
            self._find_deadlock()
            while not group.done and self._failure is None:
                self._moved.wait()
            del self._waiting[rank]
            if not group.done:
                where = f"rank {rank}, {group.label}"
                expected, got = "the group to complete", self._failure or "a failure"
                raise TransferError(where, expected=expected, got=got, remedy="The order of grouped calls is wrong.")

    def _leave(self, rank: int) -> None:
        with self._moved:
            self._gone.add(rank)
            self._find_deadlock()

    def _find_deadlock(self) -> None:
        everyone_waits = len(self._waiting) + len(self._gone) == self.world_size
        if self._waiting and everyone_waits and not any(group.done for group in self._waiting.values()):
            waits = "; ".join(f"rank {rank} in {group.label}" for rank, group in sorted(self._waiting.items()))
            self._failure = self._failure or f"deadlock: {waits}; gone: {sorted(self._gone)}"
            self._moved.notify_all()


class StrictTransport:
    """One rank of a `StrictWorld`."""

    def __init__(self, world: StrictWorld, rank: int) -> None:
        self.rank, self.world_size, self.device_ranks = rank, world.world_size, world.world_size
        self.phase = "start"
        self.clock = Clock()
        self._world = world
        self._last_key: Key | None = None
        self._under_way: dict[str, list[_StrictPending]] = {"transfer": [], "collective": []}
        self._members: tuple[int, ...] = ()
        self._order = ""
        self._place = rank  # in the world

    def connect(self, peers: Sequence[int]) -> None:
        new = self._world.meet(self._place, peers, order=self._order)
        self.exchange(*([(torch.zeros(1), peer) for peer in new] for _ in range(2))).wait()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        operations = [Operation(kind="send", peer=peer, size=_size(t), payload=t) for t, peer in sends]
        operations += [Operation(kind="receive", peer=peer, size=_size(t), payload=t) for t, peer in receives]
        return self._post("transfer", operations) if operations else Done()

    def all_reduce(self, tensor: Tensor) -> None:
        self._collective("all_reduce", tensor, tensor, lambda tensors: [_sum(tensors)] * len(tensors)).wait()

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        self.reduce_scatter_async(output, source).wait()

    def reduce_scatter_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        return self._collective("reduce_scatter", output, source, lambda each: _sum(each).chunk(self.world_size), key)

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        self.all_gather_async(output, source).wait()

    def all_gather_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        return self._collective("all_gather", output, source, lambda tensors: [torch.cat(tensors)] * len(tensors), key)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._collective(
            f"broadcast from {source}", tensor, tensor, lambda tensors: [tensors[source].clone()] * len(tensors)
        ).wait()

    def among(self, groups: Sequence[Sequence[int]]) -> Transport:
        members = next(tuple(ranks) for ranks in groups if self._place in ranks)
        return _Among(self, members)

    def apart(self) -> Transport:
        """Return the same ranks, which have not met; one queue has the transfers of both: that is stricter."""
        return _Among(self, tuple(range(self.world_size)), order=f"{self._order} apart")

    def close(self) -> None:
        """Nothing to leave: the thread ends."""

    def _collective(
        self,
        name: str,
        output: Tensor,
        source: Tensor,
        combine: Callable[[list[Tensor]], Sequence[Tensor]],
        key: Key | None = None,
    ) -> Pending:
        size, payload = (name, _size(output), _size(source)), (output, source, combine)
        operation = Operation(kind="collective", size=size, key=key, payload=payload, members=self._members)
        if key is not None:
            if self._last_key is not None and key <= self._last_key:
                self._refuse(f"a call after {self._last_key}", str(key), "Post calls in the order of their keys.")
            self._last_key = key
        return self._post("collective", [operation], key)

    def _post(self, kind: str, operations: Sequence[Operation], key: Key | None = None) -> Pending:
        """Queue a group.

        Raises:
            TransferError: calls of the other kind, without a key, have not been waited for (order rule 4).
        """
        other = "collective" if kind == "transfer" else "transfer"
        if unfinished := [each for each in self._under_way[other] if each.key is None]:
            got = f"{len(unfinished)} not waited for, the first of them posted in {unfinished[0].group.label}"
            self._refuse(f"no {other} under way when a {kind} is posted", got, f"Wait for every {other} first.")
        label = self.phase if key is None else f"{self.phase}, {key}"
        group = self._world.post(self._place, label, operations, order=self._order)
        pending = _StrictPending(self, group, self._under_way[kind], key)
        self._under_way[kind].append(pending)
        return pending

    def _refuse(self, expected: str, got: str, remedy: str) -> NoReturn:
        error = TransferError(f"rank {self._place}, {self.phase}", expected=expected, got=got, remedy=remedy)
        self._world.fail(str(error))
        raise error


class _Among(StrictTransport):
    """The collectives of some ranks, or transfers of all, under the same rules beside transfers and collectives."""

    def __init__(self, world: StrictTransport, members: tuple[int, ...], *, order: str = "") -> None:
        self._place, self.rank, self.world_size = world._place, members.index(world._place), len(members)
        self.device_ranks = world.device_ranks
        self.clock, self._world, self._last_key, self._under_way = world.clock, world._world, None, world._under_way
        self._parent, self._members, self._order = world, members, order

    @property
    def phase(self) -> str:
        """Where in the step the rank is, in words."""
        return self._parent.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._parent.phase = phase


class _StrictPending:
    def __init__(
        self, transport: StrictTransport, group: Group, under_way: list[_StrictPending], key: Key | None
    ) -> None:
        self.group, self.key = group, key
        self._transport, self._under_way = transport, under_way

    def wait(self) -> None:
        if self in self._under_way:
            self._under_way.remove(self)
        is_collective = self.group.operations[0].kind == "collective"
        with self._transport.clock.waiting(in_collective=is_collective):
            self._transport._world.wait(self._transport._place, self.group)


def _size(tensor: Tensor) -> tuple[object, ...]:
    assert tensor.is_contiguous(), f"messages must be contiguous, got strides {tensor.stride()}"
    return (tuple(tensor.shape), str(tensor.dtype))


def _sum(tensors: list[Tensor]) -> Tensor:
    return sum(tensors[1:], tensors[0].clone())


@torch.no_grad()
def _move(senders: list[Operation], receivers: list[Operation]) -> None:
    if senders[0].kind == "send":
        receivers[0].payload.copy_(senders[0].payload)
        return
    payloads = [operation.payload for operation in senders]
    combined = payloads[0][2]([source for _, source, _ in payloads])
    for (output, _, _), value in zip(payloads, combined, strict=True):
        output.copy_(value)
