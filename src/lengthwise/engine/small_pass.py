"""Small forward and backward passes of a model as one rank of any microbatch runs them, and what is there on the way.

1. One sequence is cut as a plan would cut it; this rank runs its part alone, and what others would send is zeros.
2. All that an operation makes is counted until it is freed, and noted after each one; on GPUs the most that was asked
   of the allocator between two attentions is, in a pass that has run once before: what libraries and compiled code
   allocate the first time is of no microbatch.
3. Two passes of different length, whose operations are the same, give a line over the rows for each moment
   (`cost.MicrobatchBytes`); where routing makes them differ, for the highest moment between two attentions. A line that
   falls is refused: something else was allocated or freed meanwhile, and what it says of long passes is wrong.

Costs a second or less a pass for a model of 100M parameters. Why lines: docs/decisions/capacity-measured.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lengthwise.attention import ActivationPolicy, BlockKernel, PlannedAttention
from lengthwise.comm import Done, Pending, SoloTransport
from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.cost import MicrobatchBytes, Moments
from lengthwise.engine.live_bytes import LiveBytes
from lengthwise.models import KeyedDropout, apply_policy, model_loss, rows_dropout, run_layers
from lengthwise.offload import ActivationSaver, CopyStore, parameter_storages
from lengthwise.program import lower_microbatch
from lengthwise.report.figures import count

Segment = list[tuple[object, int]]
"""Operations and the bytes that there were after each, between two attentions."""
Casting = Callable[[], AbstractContextManager[Any]]
"""Makes the autocast of one forward."""
RunLayers = Callable[[PlannedAttention, Tensor, Tensor], object]
"""Runs layers forward on ids and positions, (rows,)."""
_CHUNKS = 2
_FALL_BYTES = 2**21  # that a library's choices among kernels explain between two passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a sequence lies: over how many ranks, which of them looks, and how many of them split heads."""

    degree: int = 1
    position: int = 0
    heads: int = 1


ALONE = Layout()


class Lone(SoloTransport):
    """One rank of a ring without the others: what it would be sent is zeros."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Pending:
        """Drop what would be sent, and fill what would arrive."""
        del sends
        for message, _ in receives:
            message.zero_()
        return Done()


class _Watch(Protocol):
    """Notes bytes between marks."""

    segments: list[Segment]
    is_quiet: bool

    def mark(self) -> None: ...


class _LiveWatch(LiveBytes):
    """Notes what is alive after each operation."""

    def __init__(self, *before: Tensor) -> None:
        super().__init__(*before)
        self.segments: list[Segment] = [[]]
        self.is_quiet = False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and note the bytes."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not self.is_quiet:
            self.segments[-1].append((func, self.now_bytes))
        return result

    def mark(self) -> None:
        """End a segment and begin another."""
        self.segments[-1].append((None, self.now_bytes))
        self.segments.append([])


class _CudaWatch:
    """Notes the most bytes that were asked of the device's allocator between marks.

    What was asked for, and not the blocks that were given: one of more than 1 MB may have 1 MB too many, which is as
    much as a tensor of a small pass.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, is_torch = device, torch.cuda.get_allocator_backend() == "native"
        self._counted = "requested_bytes.all" if is_torch else "allocated_bytes.all"  # which others do not count
        torch.cuda.synchronize(device)
        torch.empty(1, device=device)  # has the allocator take back what streams have done with
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_stats(device)[f"{self._counted}.current"]
        self.segments: list[Segment] = []
        self.is_quiet = False

    def __enter__(self) -> _CudaWatch:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the last segment."""
        self.mark()

    def mark(self) -> None:
        """End a segment: its peak, and what is there at its end."""
        held = torch.cuda.memory_stats(self._device)
        self.segments.append([(None, held[f"{self._counted}.{when}"] - self._before) for when in ("peak", "current")])
        torch.cuda.reset_peak_memory_stats(self._device)


class _QuietSaver(ActivationSaver):
    """A saver whose own operations are not noted: what they make is, with the operation that comes next."""

    watch: _Watch | None = None

    def pack(self, tensor: Tensor) -> Any:
        """Take what autograd saves."""
        with self._quiet():
            return super().pack(tensor)

    def unpack(self, saved: Any) -> Tensor:
        """Return what was saved."""
        with self._quiet():
            return super().unpack(saved)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        assert self.watch is not None, "set before the pass"
        self.watch.is_quiet = True
        try:
            yield
        finally:
            self.watch.is_quiet = False


class _Watched(PlannedAttention):
    """Marks where attention begins and ends."""

    @staticmethod
    def mark() -> None:
        """Do nothing by default: a hook where attention begins and ends."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Do what the attention does, between marks."""
        self.mark()
        done = super().forward(*arguments, **options)
        self.mark()
        return done

    def backward(self, *arguments: Any, **options: Any) -> Any:
        """Do what the attention does, between marks."""
        self.mark()
        gradients = super().backward(*arguments, **options)
        self.mark()
        return gradients


class FallingLine(ConfigError):  # noqa: N818 - the name says what happened
    """Two passes of which the longer held less: what long ones would hold does not follow from them."""

    def __init__(self, got: str) -> None:
        expected = "more rows to hold no less, in two short passes of the model that measure what memory holds"
        remedy = "Give {capacity_tokens} a number, or end what else allocates on the device meanwhile."
        super().__init__("capacity_tokens", expected=expected, got=got, remedy=remedy)

    def __reduce__(self) -> tuple[object, ...]:  # of one argument
        return FallingLine, (self.got,), {"place": self.place}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a pass held: in its forward but the loss, in the loss, and in its backward."""

    rows: int
    saved_bytes: int
    forward: Sequence[Segment] = ()
    loss: Sequence[Segment] = ()
    backward: Sequence[Segment] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallPasses:
    """Runs small passes of a model under one kind of recomputation, but those that are `done`, of any kind.

    casting: around each forward, as mixed precision has it; what it keeps of weights ends with it. layers_passed: as
    of `PlannedAttention`.
    """

    model: nn.Module
    kernel: BlockKernel
    recompute: str
    layout: Layout = ALONE
    done: dict[object, Seen] = field(default_factory=dict)
    casting: Casting = nullcontext
    layers_passed: int = 0

    def measure(self, rows: int, *, chunk_tokens: int | None, offloads: bool) -> MicrobatchBytes:
        """Measure all moments of microbatches, from passes of so many rows and half of them.

        `chunk_tokens`: whose loss is made in chunks of so many tokens; None: all at once.
        """
        chunked = chunk_tokens is not None
        seen = [self.run(each, chunked=chunked) for each in (rows // 2, rows)]
        without = [self.run(each.rows, chunked=chunked, away=each.saved_bytes) for each in seen if offloads]
        return fitted(seen, without, layers=self._config.num_hidden_layers, chunk_tokens=chunk_tokens)

    def saved(self, rows: int, run: RunLayers | None = None) -> Seen:
        """Run the layers forward, or what `run` runs of them; return what autograd saves."""
        planned, ids, positions = self._start(rows)
        saver = ActivationSaver(None, stays=parameter_storages(self.model))
        policy = ActivationPolicy(recompute=self.recompute, saver=saver)
        with self.casting(), torch.enable_grad(), apply_policy(self.model, planned, policy, self._dropout(planned)):
            (run or partial(run_layers, self.model))(planned, ids, positions)
        return Seen(rows=planned.num_rows, saved_bytes=saver.totals.saved_bytes)

    def run(self, rows: int, *, chunked: bool, away: int = 0) -> Seen:
        """Run forward and backward, of `away` bytes all away from the device; gradients are added to what is there."""
        key = (self.recompute, self.layout, rows, chunked, away)
        if key not in self.done:
            if _asks_an_allocator(self._device):
                self._run(rows, chunked=chunked, away=away)  # does not count
            self.done[key] = self._run(rows, chunked=chunked, away=away)
        return self.done[key]

    def _run(self, rows: int, *, chunked: bool, away: int) -> Seen:
        planned, ids, positions = self._start(rows)
        layers = self._config.num_hidden_layers
        saver = _QuietSaver(
            CopyStore() if away else None,
            stays=parameter_storages(self.model),
            offload_bytes=away,
            layer_bytes=away // layers,
        )
        policy = ActivationPolicy(recompute=self.recompute, saver=saver)
        at_once = len(ids) // _CHUNKS * self._config.vocab_size if chunked else None
        gradients = (parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)
        before = (*self.model.parameters(), *self.model.buffers(), *gradients, ids, positions)
        asks = _asks_an_allocator(self._device)
        with _CudaWatch(self._device) if asks else _LiveWatch(*before) as watch:
            planned.mark, saver.watch, saved_bytes = watch.mark, watch, list[int]()

            def decoded() -> None:
                watch.mark()
                saved_bytes.append(saver.totals.saved_bytes)  # what the loss saves is not of the layers

            with (
                self.casting(),
                torch.enable_grad(),
                apply_policy(self.model, planned, policy, self._dropout(planned)),
                _at_end_of(self.model, decoded),
            ):
                loss = model_loss(self.model, planned, ids, positions, ids, logits_at_once=at_once)
            watch.mark()
            turn = len(watch.segments) - (0 if asks else 1)
            (loss / len(ids)).backward()
            del loss
        segments = watch.segments
        return Seen(
            rows=planned.num_rows,
            saved_bytes=saved_bytes[0],
            forward=segments[: turn - 1],
            loss=segments[turn - 1 : turn],
            backward=segments[turn:],
        )

    @property
    def _config(self) -> Any:
        return self.model.config

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _dropout(self, planned: PlannedAttention) -> KeyedDropout | None:
        return rows_dropout(self.model, lambda: torch.arange(planned.num_rows, device=self._device))

    def _start(self, rows: int) -> tuple[_Watched, Tensor, Tensor]:
        layout = self.layout
        piece = Piece(ranks=tuple(range(layout.degree)), sequences=(0,), heads=layout.heads)
        plan = Plan(
            ranks=layout.degree,
            layers=self._config.num_hidden_layers,
            capacity=rows * layout.degree + 1,
            tokens=(rows * layout.degree,),
            microbatches=(Microbatch(pieces=(piece,), recompute=self.recompute),),
            requires=("heads",) if layout.heads > 1 else (),
        )
        program = lower_microbatch(plan, 0)
        planned = _Watched(program, Lone(layout.position, layout.degree), self.kernel, layers_passed=self.layers_passed)
        segments = program.segments(layout.position)
        positions = torch.cat([torch.arange(each.start, each.stop, device=self._device) for each in segments])
        return planned, positions % self._config.vocab_size, positions


def _asks_an_allocator(device: torch.device) -> bool:
    """Whether passes on a device are counted by its allocator, and not tensor by tensor."""
    return device.type == "cuda"


@contextmanager
def _at_end_of(model: Any, mark: Callable[[], None]) -> Iterator[None]:
    """Mark where the decoder of a model has run, once: chunks of the loss seem to run it again."""
    ran: list[bool] = []

    def hook(*_: object) -> None:
        if not ran:
            mark()
        ran.append(True)

    handle = model.get_decoder().register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def fitted(
    seen: Sequence[Seen], without: Sequence[Seen], *, layers: int, chunk_tokens: int | None = None
) -> MicrobatchBytes:
    """Return the lines through two passes; `without`: the same passes with all that is saved away, or none.

    Raises:
        FallingLine: more rows held less at some moment.
    """
    smaller, larger = seen
    rows = (smaller.rows, larger.rows)
    a_row = (larger.saved_bytes - smaller.saved_bytes) / (rows[1] - rows[0])
    saved = MicrobatchBytes(layers=max(layers, 2), saved_fixed=larger.saved_bytes - a_row * rows[1], saved_a_row=a_row)
    if not larger.backward:
        return saved
    forward, loss, backward = (
        _aligned([getattr(each, part) for each in (*seen, *without)], rows) for part in ("forward", "loss", "backward")
    )
    if chunk_tokens is not None:
        loss = [_of_chunks(lines, chunk_tokens) for lines in loss]
    forward = [np.concatenate(both) for both in zip(forward, loss, strict=True)]
    return replace(saved, forward=_moments(*forward), backward=_moments(*backward))


def _moments(live: NDArray[np.float64], less: NDArray[np.float64] | None = None) -> Moments:
    return Moments(live=live, removable=None if less is None else live - less)


def _of_chunks(lines: NDArray[np.float64], chunk_tokens: int) -> NDArray[np.float64]:
    """Return the line of the highest moment of a loss, at its own chunks; its last moment is without any.

    Chunks are as many in both passes, and scale with the rows: what grows beyond the last moment is of a chunk.
    """
    fixed, a_token = (lines - lines[-1]).T
    highest = (fixed + _CHUNKS * a_token * chunk_tokens).max()
    return lines[-1:] + np.array([highest, 0.0])


def _aligned(passes: Sequence[Sequence[Segment]], rows: tuple[int, int]) -> list[NDArray[np.float64]]:
    """Return the lines of each two passes, (moments, 2): of each operation if all did the same, else of the highest."""
    if len({len(each) for each in passes}) > 1:
        passes = [[[step for segment in each for step in segment]] for each in passes]
    columns: list[list[int]] = [[] for _ in passes]
    for segments in zip(*passes, strict=True):
        same = len({tuple(what for what, _ in segment) for segment in segments}) == 1
        for column, segment in zip(columns, segments, strict=True):
            held = [size for _, size in segment]
            column += held if same else [max(held), held[-1]]
    small, large = np.array(columns[::2], dtype=float), np.array(columns[1::2], dtype=float)
    fall = float((small - large).max())
    if fall > _FALL_BYTES:
        raise FallingLine(f"{rows[1]} rows that held {count(fall)}B less than {rows[0]}")
    slope = np.maximum(0.0, large - small) / (rows[1] - rows[0])
    return list(np.stack([large - slope * rows[1], slope], axis=-1))
