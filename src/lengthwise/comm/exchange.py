"""Small agreements between all ranks: share bytes, numbers, names or errors, and check that data are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch

from lengthwise.comm.transport import Transport
from lengthwise.core.errors import (
    Collector,
    LengthwiseError,
    OutputError,
    RankError,
    as_values,
    from_values,
    raise_problems,
)

Value = TypeVar("Value")


def broadcast_bytes(transport: Transport, data: bytes | None, source: int = 0) -> bytes:
    """Return on every rank the `data` of rank `source`; other ranks pass None. Collective."""
    if transport.world_size == 1:
        assert data is not None, "the only rank must hold the data"
        return data
    own = data if transport.rank == source else b""
    assert own is not None, f"rank {source} must hold the data that it sends"
    size = torch.tensor([len(own)], dtype=torch.int64)
    transport.broadcast(size, source)
    buffer = torch.zeros(int(size), dtype=torch.uint8)
    if transport.rank == source:
        buffer.numpy()[:] = np.frombuffer(own, dtype=np.uint8)
    if buffer.numel():
        transport.broadcast(buffer, source)
    return buffer.numpy().tobytes()


def share_numbers(transport: Transport, numbers: Sequence[float]) -> torch.Tensor:
    """Return the numbers of all ranks, fp64 (ranks, numbers). Collective, unless there are no numbers."""
    rows = torch.empty(transport.world_size, len(numbers), dtype=torch.float64)
    if numbers:
        transport.all_gather(rows.view(-1), torch.tensor(numbers, dtype=torch.float64))
    return rows


def share_first(transport: Transport, found: Mapping[str, str]) -> dict[str, str]:
    """Return the findings of the lowest rank that has any, with its number, or {} if none has. Collective."""
    if transport.world_size == 1:
        return dict(found)
    ranks = share_numbers(transport, [len(found)])[:, 0].nonzero().flatten().tolist()
    if not ranks:
        return {}
    named = {name: f"rank {transport.rank}: {each}" for name, each in found.items()}
    return json.loads(broadcast_bytes(transport, json.dumps(named).encode(), ranks[0]))


def from_first(transport: Transport, work: Callable[[], Value]) -> Value:
    """Return on every rank the result of `work` on rank 0, which must be JSON; raise its error on all. Collective."""
    found, problems = None, Collector()
    if not transport.rank:
        found = problems.attempt(work)
    own = json.dumps([found, as_values(problems.problems)]).encode()
    sent = json.loads(broadcast_bytes(transport, None if transport.rank else own))
    raise_problems(problems.problems or from_values(sent[1]))
    return sent[0]


def on_first_rank(transport: Transport, work: Callable[[], object]) -> None:
    """Run `work`, which writes, on rank 0 and wait for it. Collective.

    Raises its error on every rank; an error that is not ours becomes an OutputError.
    """

    def written() -> None:
        try:
            work()
        except LengthwiseError:
            raise
        except Exception as error:  # of a library; the other ranks wait for the result
            expected, remedy = "to write on rank 0", "Correct what the error names."
            got = f"{type(error).__name__}: {error}"
            raise OutputError("rank 0", expected=expected, got=got, remedy=remedy) from error

    from_first(transport, written)


def raise_together(transport: Transport, problems: Sequence[LengthwiseError]) -> None:
    """Raise on every rank the problems of the lowest rank that has any; return if none has. Collective."""
    failed = share_numbers(transport, [len(problems)])[:, 0].nonzero().flatten().tolist()
    if failed:
        is_own = transport.rank == failed[0]
        sent = broadcast_bytes(transport, json.dumps(as_values(problems)).encode() if is_own else None, failed[0])
        raise_problems(problems if is_own else from_values(json.loads(sent)))


def share_names(transport: Transport, own: Iterable[str]) -> list[str]:
    """Return the sorted names of all ranks; cheap if all have the same. Collective."""
    names = sorted(own)
    text = json.dumps(names).encode()
    digest = float(int.from_bytes(hashlib.sha256(text).digest()[:6], "big"))
    if len(share_numbers(transport, [digest]).unique()) == 1:
        return names
    ranks = range(transport.world_size)
    sent = (broadcast_bytes(transport, text if rank == transport.rank else None, rank) for rank in ranks)
    return sorted({name for each in sent for name in json.loads(each)})


_SAME_RUN = "All ranks must run the same version of lengthwise with the same run file and data."


def agree(transport: Transport, data: bytes, what: str, remedy: str = _SAME_RUN) -> None:
    """Raise RankError on every rank, with the ranks whose `data` differ from rank 0's, if there are any. Collective."""
    if transport.world_size == 1:
        return
    own = torch.frombuffer(bytearray(hashlib.sha256(data).digest()), dtype=torch.uint8)
    everyone = torch.empty(own.numel() * transport.world_size, dtype=torch.uint8)
    transport.all_gather(everyone, own)
    rows = everyone.view(transport.world_size, -1)
    different = [rank for rank in range(transport.world_size) if not torch.equal(rows[rank], rows[0])]
    if different:
        where = f"rank {transport.rank}, {transport.phase}"
        got = f"another digest on {'rank' if len(different) == 1 else 'ranks'} {', '.join(map(str, different[:10]))}"
        raise RankError(where, expected=f"the same {what} on all ranks", got=got, remedy=remedy)
