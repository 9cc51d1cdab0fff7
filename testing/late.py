"""A transport that moves nothing before `wait`: who touches a tensor too early, or frees one, sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lengthwise.comm.transport import Key, Message, Pending, Transport, TransportWrapper


class LateTransport(TransportWrapper):
    """A transport that reads sources and writes targets only when a call is waited for; until then targets are NaN.

    For calls that all ranks wait for in one order, as those of sharded parameters are; transfers go on as they are.
    """

    def reduce_scatter_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        return _Late(output, lambda: self._inner.reduce_scatter_async(output, source, key=key).wait())

    def all_gather_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        return _Late(output, lambda: self._inner.all_gather_async(output, source, key=key).wait())

    def among(self, groups: Sequence[Sequence[int]]) -> Transport:
        return LateTransport(self._inner.among(groups))

    def apart(self) -> Transport:
        """Return the same ranks with transfers of their own, as late."""
        return LateTransport(self._inner.apart())

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        for room, _ in receives:
            if room.is_floating_point():
                room.fill_(float("nan"))
        return self._inner.exchange(sends, receives)


class _Late:
    def __init__(self, output: Tensor, call: Callable[[], None]) -> None:
        output.fill_(float("nan"))
        self._call = call

    def wait(self) -> None:
        self._call()
