"""Small forward and backward passes of a model as one rank of any microbatch runs them, and what is there on the way.

One sequence is cut as a plan would cut it; this rank runs its part alone, and what others would send is zeros. A chunk
of a stage runs on random hidden states, and its backward on a gradient of zeros. All that an operation makes is counted
until it is freed; on GPUs it is the most that was asked of the allocator between two attentions, in a pass that has run
once before. Two passes of different length give a line over the rows for each moment (`cost.MicrobatchBytes`); where
routing makes their operations differ, for the highest moment between two attentions. A line that falls is refused.

Why so: docs/decisions/capacity-measured.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lengthwise.attention import ActivationPolicy, BlockKernel, PlannedAttention
from lengthwise.comm import Lone
from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.cost import MicrobatchBytes, Moments
from lengthwise.engine.byte_watch import ByteWatch, CudaWatch, LiveWatch, Segment
from lengthwise.engine.stage_messages import empty_hidden, given_on, received
from lengthwise.models import WHOLE, Chunk, KeyedDropout, apply_policy, model_loss, rows_dropout, run_chunk, run_layers
from lengthwise.offload import ActivationSaver, CopyStore, parameter_storages
from lengthwise.program import lower_microbatch
from lengthwise.report.figures import count

Casting = Callable[[], AbstractContextManager[Any]]
"""Makes the autocast of one forward."""
_CHUNKS = 2
_FALL_BYTES = 2**21  # that a library's choices among kernels explain between two passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a sequence lies: over how many ranks, which of them looks, and how many of them split heads."""

    degree: int = 1
    position: int = 0
    heads: int = 1


ALONE = Layout()


class _QuietSaver(ActivationSaver):
    """A saver whose own operations are not noted: what they make is, with the operation that comes next."""

    watch: ByteWatch | None = None

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

    casting: around each forward, as mixed precision has it; what it keeps of weights ends with it. chunk: of the model.
    """

    model: nn.Module
    kernel: BlockKernel
    recompute: str
    layout: Layout = ALONE
    chunk: Chunk = WHOLE
    done: dict[object, Seen] = field(default_factory=dict)
    casting: Casting = nullcontext

    def measure(self, rows: int, *, chunk_tokens: int | None, offloads: bool) -> MicrobatchBytes:
        """Measure all moments of microbatches, from passes of so many rows and half of them.

        `chunk_tokens`: whose loss is made in chunks of so many tokens; None: all at once.
        """
        chunked = chunk_tokens is not None
        seen = [self.run(each, chunked=chunked) for each in (rows // 2, rows)]
        without = [self.run(each.rows, chunked=chunked, away=each.saved_bytes) for each in seen if offloads]
        return self._fitted(seen, without, chunk_tokens=chunk_tokens)

    def saved(self, rows: int) -> MicrobatchBytes:
        """Measure what autograd saves of the layers, from forward passes of so many rows and half of them."""
        return self._fitted([self._saved(each) for each in (rows // 2, rows)])

    def _fitted(
        self, seen: Sequence[Seen], without: Sequence[Seen] = (), *, chunk_tokens: int | None = None
    ) -> MicrobatchBytes:
        found = fitted(seen, without, layers=self._num_layers, chunk_tokens=chunk_tokens)
        return replace(found, is_last=self.chunk.is_last)

    def _saved(self, rows: int) -> Seen:
        planned, ids, positions = self._start(rows)
        saver = ActivationSaver(None, stays=parameter_storages(self.model))
        policy = ActivationPolicy(recompute=self.recompute, saver=saver)
        hidden = self._hidden(planned)
        with (
            self.casting(),
            torch.enable_grad(),
            self.chunk.running(None if hidden is None else hidden.requires_grad_()),
            apply_policy(self.model, planned, policy, self._dropout(planned)),
        ):
            (run_layers if self.chunk.is_last else run_chunk)(self.model, planned, ids, positions)
        return Seen(rows=planned.num_rows, saved_bytes=saver.totals.saved_bytes)

    def run(self, rows: int, *, chunked: bool, away: int = 0) -> Seen:
        """Run forward and backward, of `away` bytes all away from the device; gradients are added to what is there."""
        key = (self.recompute, self.layout, self.chunk.number, rows, chunked, away)
        if key not in self.done:
            if _asks_an_allocator(self._device):
                self._run(rows, chunked=chunked, away=away)  # does not count
            self.done[key] = self._run(rows, chunked=chunked, away=away)
        return self.done[key]

    def _run(self, rows: int, *, chunked: bool, away: int) -> Seen:
        planned, ids, positions = self._start(rows)
        saver = _QuietSaver(
            CopyStore() if away else None,
            stays=parameter_storages(self.model),
            offload_bytes=away,
            layer_bytes=away // self._num_layers,
        )
        policy = ActivationPolicy(recompute=self.recompute, saver=saver)
        at_once = len(ids) // _CHUNKS * self.config.vocab_size if chunked else None
        gradients = (parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)
        sent = self._hidden(planned)
        before = (*self.model.parameters(), *self.model.buffers(), *gradients, ids, positions)
        asks = _asks_an_allocator(self._device)
        with CudaWatch(self._device) if asks else LiveWatch(*before, *([] if sent is None else [sent])) as watch:
            planned.mark, saver.watch, saved_bytes = watch.mark, watch, list[int]()

            def decoded() -> None:
                watch.mark()
                saved_bytes.append(saver.totals.saved_bytes)  # what the loss saves is not of the layers

            after = list[Tensor]()
            with self.casting(), torch.enable_grad(), _at_end_of(self.model, decoded):
                hidden = None if sent is None else received(sent.clone(), [])
                with (
                    self.chunk.running(hidden),
                    apply_policy(self.model, planned, policy, self._dropout(planned)),
                ):
                    if self.chunk.is_last:
                        end = model_loss(self.model, planned, ids, positions, ids, logits_at_once=at_once)
                    else:
                        end = given_on(run_chunk(self.model, planned, ids, positions), after)
                del hidden
            watch.mark()
            turn = len(watch.segments) - (0 if asks else 1)
            if not self.chunk.is_last:
                after.append(empty_hidden(self.model, self.chunk, planned.num_rows).zero_())
            (end / len(ids)).backward()
            del end
        segments = watch.segments
        return Seen(
            rows=planned.num_rows,
            saved_bytes=saved_bytes[0],
            forward=segments[: turn - 1],
            loss=segments[turn - 1 : turn],
            backward=segments[turn:],
        )

    @property
    def config(self) -> Any:
        """Return the model's config."""
        return self.model.config

    @property
    def _num_layers(self) -> int:
        return self.config.num_hidden_layers if self.chunk.num_layers is None else self.chunk.num_layers

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
            layers=self.config.num_hidden_layers,
            capacity=rows * layout.degree + 1,
            tokens=(rows * layout.degree,),
            microbatches=(Microbatch(pieces=(piece,), recompute=self.recompute),),
            requires=("heads",) if layout.heads > 1 else (),
        )
        program = lower_microbatch(plan, 0)
        watched = Lone(layout.position, layout.degree)
        planned = _Watched(program, watched, self.kernel, layers_passed=self.chunk.layers_passed)
        segments = program.segments(layout.position)
        positions = torch.cat([torch.arange(each.start, each.stop, device=self._device) for each in segments])
        return planned, positions % self.config.vocab_size, positions

    def _hidden(self, planned: PlannedAttention) -> Tensor | None:
        """Return what another stage might send, random so that routers choose; None: the chunk runs on ids."""
        if self.chunk.is_first:
            return None
        room = empty_hidden(self.model, self.chunk, planned.num_rows)
        return room.copy_(torch.randn(room.shape, generator=torch.Generator().manual_seed(0)))


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
