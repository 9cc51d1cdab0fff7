"""What a microbatch holds on this rank, measured by small passes of the model.

1. One sequence is cut as a plan cuts it, or its second half continues its first. This rank runs its part alone, with
  zeros from others. A stage's chunk runs on random hidden states, its backward on zeros. If a tower trains, all tokens
  are those of images.
2. Everything that an operation makes counts until it is freed; on GPUs, the allocator's peak between two saved tensors,
  in a size's second pass. Offload can remove what autograd saved until its use.
3. A pass, and one of half its rows, give a line over the rows for each moment (`cost.MicrobatchBytes`). Where their
  operations differ (routing, scans), lines go through the highest moments of forward, loss and backward. Falling lines
  are refused.

Why so: docs/decisions/capacity-measured.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import inf, lcm
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lengthwise.attention import ActivationPolicy, BlockKernel, PlannedAttention
from lengthwise.comm import Lone
from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import LayerCut
from lengthwise.cost import WINDOW_LAYERS, MicrobatchBytes, Moments, StepBytes, shape_from_config
from lengthwise.engine.byte_watch import AllocatorWatch, LiveWatch, Segment
from lengthwise.engine.stage_messages import empty_hidden, given_on, received
from lengthwise.engine.stage_passes import passes_of
from lengthwise.models import (
    WHOLE,
    Chunk,
    apply_policy,
    drawing,
    has_dropout,
    mixing_of,
    model_loss,
    position_limit,
    run_chunk,
    run_layers,
    seeing,
)
from lengthwise.models.images import ImageReader
from lengthwise.offload import ActivationSaver, parameter_storages
from lengthwise.program import lower_microbatch
from lengthwise.program.features import with_requires
from lengthwise.report.figures import count

WHOLE_MODEL: Mapping[int, Chunk] = {WHOLE.number: WHOLE}
Casting = Callable[[], AbstractContextManager[Any]]
"""Makes the autocast of one forward."""
_ROWS = 64  # of the larger pass: enough for lines that are exact
_MOST_ROWS = 512  # where routing decides which operations run, and lines are not exact
_FLOPS = 3e10  # that the larger pass may then take: about a second on one core
_SCAN_ROWS = 64  # of a chunk of a delta rule; layers of Mamba 2 have `chunk_size`
_LOSS_CHUNKS = 2  # of a pass whose loss is made in chunks
_FALL_BYTES = 2**21  # that a library's choices among kernels explain between two passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layout of a sequence: number of ranks, position of this rank, number of ranks that split heads.

    branches: True if its second half is a sequence that continues the first, as for rows with a shared prefix.
    """

    degree: int = 1
    position: int = 0
    heads: int = 1
    branches: bool = False


ALONE = Layout()


class _NotedSaver(ActivationSaver):
    """Calls `note` before what waits for backward changes."""

    note: Callable[[], Any] = staticmethod(lambda: None)

    def pack(self, tensor: Tensor) -> Any:
        self.note()
        return super().pack(tensor)

    def unpack(self, saved: Any) -> Tensor:
        self.note()
        return super().unpack(saved)


class FallingLine(ConfigError):  # noqa: N818 - the name says what happened
    """The longer of two passes held less, so they do not predict long microbatches."""

    def __init__(self, got: str) -> None:
        expected = "more rows to hold no less, in two short passes of the model that measure what memory holds"
        remedy = "Give {capacity_tokens} a number, or end what else allocates on the device meanwhile."
        super().__init__("capacity_tokens", expected=expected, got=got, remedy=remedy)

    def __reduce__(self) -> tuple[object, ...]:  # of one argument
        return FallingLine, (self.got,), {"place": self.place}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The bytes of a pass: while its layers ran forward, in the loss, and in backward."""

    rows: int
    saved_bytes: int
    forward: Segment = field(default_factory=list)
    loss: Segment = field(default_factory=list)
    backward: Segment = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallPasses:
    """Runs small passes of a model, or a chunk of it, with one kind of recomputation.

    casting: autocast of each forward, which frees its cached weights at its end. reader: reader of images if a tower
    trains. done: finished passes of all kinds, which do not run again.
    """

    model: nn.Module
    kernel: BlockKernel
    recompute: str
    layout: Layout = ALONE
    chunk: Chunk = WHOLE
    done: dict[object, Seen] = field(default_factory=dict)
    casting: Casting = nullcontext
    reader: ImageReader | None = None

    @property
    def rows(self) -> int:
        """The rows of the larger pass; half of them are whole chunks of scans, and of a ring twice as many."""
        config: Any = self.model.config
        multiple, rows = 4 * lcm(self.kernel.token_multiple, self.scan_rows), _ROWS
        multiple = multiple if self.reader is None else lcm(multiple, 2 * self.reader.least_tokens)
        if shape_from_config(config.to_dict()).experts > 1:
            affordable = _FLOPS / (8.0 * sum(parameter.numel() for parameter in self.model.parameters()))
            rows = int(min(max(rows, affordable), _MOST_ROWS))
        limit = position_limit(config)
        if limit is not None:
            rows = max(2, min(rows, limit // self.layout.degree))
        return max(rows // multiple, 1) * multiple

    @property
    def scan_rows(self) -> int:
        """Rows of which this rank's scans compute whole chunks, in each of its two spans of a ring; 1 without scans."""
        if not mixing_of(self.model).has_states:
            return 1
        sizes = (getattr(each, "chunk_size", None) for each in self.model.modules())
        return max((each for each in sizes if isinstance(each, int)), default=_SCAN_ROWS) * min(self.layout.degree, 2)

    def measure(self, *, chunk_rows: int | None) -> MicrobatchBytes:
        """Measure all moments. chunk_rows: rows per chunk of the loss, None for all logits at once."""
        seen = [self.run(each, chunked=chunk_rows is not None) for each in (self.rows // 2, self.rows)]
        forward, loss, backward = (_lines(seen, part, self._counted_layers) for part in ("forward", "loss", "backward"))
        if chunk_rows is not None:
            loss = Moments(live=_of_chunks(loss.live), removable=loss.removable)
        return replace(
            self._saved_line(seen),
            forward=Moments(
                live=np.concatenate([forward.live, loss.live]),
                removable=np.concatenate([forward.removable, loss.removable]),
            ),
            backward=backward,
            chunk_rows=chunk_rows or inf,
        )

    def measure_saved(self) -> MicrobatchBytes:
        """Measure by forward passes what autograd saves of the layers."""
        return self._saved_line([self._run_forward(each) for each in (self.rows // 2, self.rows)])

    def run(self, rows: int, *, chunked: bool) -> Seen:
        """Run forward and backward; gradients are added to those that exist."""
        key = (self.recompute, self.layout, self.chunk.number, rows, chunked)
        if key not in self.done:
            if _asks_an_allocator(self._device):
                self._run(rows, chunked=chunked)  # libraries allocate once, for each size
            self.done[key] = self._run(rows, chunked=chunked)
        return self.done[key]

    def _saved_line(self, seen: Sequence[Seen]) -> MicrobatchBytes:
        smaller, larger = seen
        a_row = (larger.saved_bytes - smaller.saved_bytes) / (larger.rows - smaller.rows)
        return MicrobatchBytes(
            layers=self._counted_layers,
            saved_fixed=larger.saved_bytes - a_row * larger.rows,
            saved_a_row=a_row,
            is_last=self.chunk.is_last,
            scan_rows=self.scan_rows,
        )

    def _run_forward(self, rows: int) -> Seen:
        planned, ids, positions = self._start(rows)
        saver, hidden = ActivationSaver(None, stays=parameter_storages(self.model)), self._hidden(planned)
        with self._running(planned, saver, None if hidden is None else hidden.requires_grad_(), rows):
            (run_layers if self.chunk.is_last else run_chunk)(self.model, planned, ids, positions)
        return Seen(rows=planned.num_rows, saved_bytes=saver.totals.saved_bytes)

    def _run(self, rows: int, *, chunked: bool) -> Seen:
        planned, ids, positions = self._start(rows)
        saver = _NotedSaver(None, stays=parameter_storages(self.model))
        at_once = len(ids) // _LOSS_CHUNKS * self._config.vocab_size if chunked else None
        gradients = (parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)
        sent, asks = self._hidden(planned), _asks_an_allocator(self._device)
        before = (*self.model.parameters(), *self.model.buffers(), *gradients, ids, positions)
        live = LiveWatch(*before, *([] if sent is None else [sent]), saver=saver)
        with AllocatorWatch(self._device, saver) if asks else live as watch:
            saver.note, saved_bytes, after = watch.note, list[int](), list[Tensor]()

            def decoded() -> None:
                watch.mark()
                saved_bytes.append(saver.totals.saved_bytes)  # without what the loss saves

            hidden = None if sent is None else received(sent.clone(), [])
            with _at_end_of(self.model, decoded), self._running(planned, saver, hidden, rows):
                if self.chunk.is_last:
                    end = model_loss(self.model, planned, ids, positions, ids, logits_at_once=at_once)
                else:
                    end = given_on(run_chunk(self.model, planned, ids, positions), after)
            del hidden
            watch.mark()
            if not self.chunk.is_last:
                after.append(empty_hidden(self.model, self.chunk, planned.num_rows).zero_())
            (end / len(ids)).backward()
            del end
        forward, loss, backward = watch.segments
        return Seen(rows=planned.num_rows, saved_bytes=saved_bytes[0], forward=forward, loss=loss, backward=backward)

    @property
    def _config(self) -> Any:
        return self.model.config

    @property
    def _num_layers(self) -> int:
        return self._config.num_hidden_layers if self.chunk.num_layers is None else self.chunk.num_layers

    @property
    def _counted_layers(self) -> int:
        return max(self._num_layers, 2)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @contextmanager
    def _running(
        self, planned: PlannedAttention, saver: ActivationSaver, hidden: Tensor | None, rows: int
    ) -> Iterator[None]:
        """Let the chunk run forward by the plan inside the block, from hidden states where it is not the first."""
        policy = ActivationPolicy(recompute=self.recompute, saver=saver)
        draws, images = has_dropout(self.model), None
        if self.reader is not None:  # the copies count, as in a step
            images = self.reader.empty(rows).to(lambda each: each.to(self._device, copy=True))
        with (
            drawing(0, self._device) if draws else nullcontext(),
            self.casting(),
            torch.enable_grad(),
            self.chunk.running(hidden),
            nullcontext() if images is None else seeing(self.model, images),
            apply_policy(self.model, planned, policy, draws=draws),
        ):
            yield

    def _start(self, rows: int) -> tuple[PlannedAttention, Tensor, Tensor]:
        layout = self.layout
        tokens, half = rows * layout.degree, rows * layout.degree // 2
        lengths, parents = ((half, tokens - half), (None, 0)) if layout.branches else ((tokens,), ())
        piece = Piece(ranks=tuple(range(layout.degree)), sequences=tuple(range(len(lengths))), heads=layout.heads)
        plan = with_requires(
            Plan(
                ranks=layout.degree,
                layers=self._config.num_hidden_layers,
                capacity=tokens + 1,
                tokens=lengths,
                parents=parents,
                microbatches=(Microbatch(pieces=(piece,), recompute=self.recompute),),
            )
        )
        program, alone = lower_microbatch(plan, 0), Lone(layout.position, layout.degree)
        planned = PlannedAttention(program, alone, self.kernel, layers_passed=self.chunk.layers_passed)
        segments = program.segments(layout.position)
        spans = [(each.start, each.stop, plan.firsts[each.sequence]) for each in segments]
        positions = torch.cat([torch.arange(*span, device=self._device) + first for *span, first in spans])
        ids = positions % self._config.vocab_size
        return planned, ids if self.reader is None else torch.full_like(ids, self.reader.token), positions

    def _hidden(self, planned: PlannedAttention) -> Tensor | None:
        """Return hidden states of another stage, random so that routers choose, or None if the chunk runs on ids."""
        if self.chunk.is_first:
            return None
        room = empty_hidden(self.model, self.chunk, planned.num_rows)
        return room.copy_(torch.randn(room.shape, generator=torch.Generator().manual_seed(0)))


def measure_microbatch(
    passes: SmallPasses,
    *,
    logits_at_once: int | None = None,
    most_rows: float = inf,
    chunks: Mapping[int, Chunk] = WHOLE_MODEL,
    stage: int = 0,
    stages: int = 1,
) -> StepBytes:
    """Measure all bytes of a rank's microbatches; gradients are added to those that exist.

    passes: passes of any chunk, of which those of the stage's `chunks` are measured. logits_at_once: logits per loss
    chunk, None for all. most_rows: most rows of a microbatch.
    """
    config: Any = passes.model.config
    chunk_rows = None if logits_at_once is None else max(1, logits_at_once // config.vocab_size)
    if chunk_rows is not None and most_rows <= chunk_rows:
        chunk_rows = None
    found = dict[int, MicrobatchBytes]()
    for number, chunk in chunks.items():
        of_chunk = replace(passes, chunk=chunk)
        found[number] = of_chunk.measure(chunk_rows=None)
        if chunk_rows is not None and chunk.is_last:
            found[number] = replace(of_chunk.measure(chunk_rows=chunk_rows), whole=found[number])
    return StepBytes(
        layers=config.num_hidden_layers,
        chunks=found,
        passes=passes_of(LayerCut(stages=stages, virtual=len(chunks)), stage),
        hidden_a_row=next(iter(chunks.values())).width * next(passes.model.parameters()).element_size(),
    )


def _asks_an_allocator(device: torch.device) -> bool:
    return device.type == "cuda"


@contextmanager
def _at_end_of(model: Any, mark: Callable[[], None]) -> Iterator[None]:
    """Call `mark` once when the model's decoder has run: chunks of the loss seem to run it again."""
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


def _of_chunks(lines: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the lines of a loss in chunks: bytes that grow beyond its last moment belong to a chunk.

    Both passes have as many chunks, so a chunk's rows grow with theirs.
    """
    last = lines[-1:]
    grown = lines - last
    return np.stack([last[:, 0] + grown[:, 0], np.broadcast_to(last[:, 1], len(lines)), _LOSS_CHUNKS * grown[:, 1]], -1)


def _lines(seen: Sequence[Seen], part: str, layers: int) -> Moments:
    """Return lines through a part of two passes: per operation if both ran the same ones, else through the highest."""
    parts: list[Segment] = [getattr(each, part) for each in seen]
    rows, more = (each.rows for each in seen)
    passes = [
        np.array([(step.live, min(step.waiting, each.saved_bytes)) for step in steps], dtype=float)
        for steps, each in zip(parts, seen, strict=True)
    ]  # (moments, 2): live, waiting; what the loss saves stays
    if len({tuple(step.operation for step in steps) for steps in parts}) > 1:
        highest = [_highest(seen, passes, share) for share in (1.0, 0.0, WINDOW_LAYERS / layers)]
        passes = [np.stack([*tops, steps[-1]]) for *tops, steps in zip(*highest, passes, strict=True)]
    small, large = passes
    fall = float((small - large)[:, 0].max())
    if fall > _FALL_BYTES:
        raise FallingLine(f"{more} rows that held {count(fall)}B less than {rows}")
    slope = np.maximum(0.0, large - small) / (more - rows)
    lines = np.stack([large - slope * more, slope, np.zeros_like(slope)], axis=-1)
    return Moments(live=lines[:, 0], removable=lines[:, 1])


def _highest(seen: Sequence[Seen], passes: Sequence[NDArray[np.float64]], share: float) -> list[NDArray[np.float64]]:
    """Return (live, waiting) of each pass at the device's peak, with a `share` of the waiting saved bytes on it.

    Layers hold nearly the same, so this may be in another layer of each pass. All passes therefore count as in the
    layer of the last one.
    """
    windows = [share * each.saved_bytes for each in seen]
    held = [steps[:, 0] - np.maximum(0.0, steps[:, 1] - window) for steps, window in zip(passes, windows, strict=True)]
    waits = passes[-1][held[-1].argmax(), 1] / max(1, seen[-1].saved_bytes)
    waiting = [waits * each.saved_bytes for each in seen]
    return [
        np.array([most.max() + max(0.0, waits_here - window), waits_here])
        for most, waits_here, window in zip(held, waiting, windows, strict=True)
    ]
