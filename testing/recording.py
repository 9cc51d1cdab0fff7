"""Writes down what a rank asks of its transport, in order, and passes it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lengthwise.comm.transport import Key, Message, Pending, Transport, TransportWrapper


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call: its name, the phase it was made in, its key, and (peer, shape, dtype) of each message."""

    name: str
    phase: str
    sends: tuple[tuple[int, tuple[int, ...], str], ...] = ()
    receives: tuple[tuple[int, tuple[int, ...], str], ...] = ()
    key: Key | None = None


class RecordingTransport(TransportWrapper):
    """A transport around another; `calls` is what went through it."""

    def __init__(self, inner: Transport, calls: list[Call] | None = None) -> None:
        super().__init__(inner)
        self.calls: list[Call] = [] if calls is None else calls

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self.calls.append(
            Call(name="exchange", phase=self.phase, sends=_described(sends), receives=_described(receives))
        )
        return self._inner.exchange(sends, receives)

    def all_reduce(self, tensor: Tensor) -> None:
        self._collective("all_reduce")
        self._inner.all_reduce(tensor)

    def reduce_scatter(self, output: Tensor, source: Tensor) -> None:
        self.reduce_scatter_async(output, source).wait()

    def reduce_scatter_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        self._collective("reduce_scatter", key)
        return self._inner.reduce_scatter_async(output, source, key=key)

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        self.all_gather_async(output, source).wait()

    def all_gather_async(self, output: Tensor, source: Tensor, *, key: Key | None = None) -> Pending:
        self._collective("all_gather", key)
        return self._inner.all_gather_async(output, source, key=key)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._collective("broadcast")
        self._inner.broadcast(tensor, source)

    def among(self, groups: Sequence[Sequence[int]]) -> Transport:
        return RecordingTransport(self._inner.among(groups), self.calls)

    def apart(self) -> Transport:
        """Return the same ranks with transfers of their own, recorded with the others."""
        return RecordingTransport(self._inner.apart(), self.calls)

    def _collective(self, name: str, key: Key | None = None) -> None:
        self.calls.append(Call(name=name, phase=self.phase, key=key))


def _described(messages: Sequence[Message]) -> tuple[tuple[int, tuple[int, ...], str], ...]:
    return tuple((peer, tuple(tensor.shape), str(tensor.dtype)) for tensor, peer in messages)
