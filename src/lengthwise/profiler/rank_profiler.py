"""One rank of a profile: runs the parts of a step repeatedly, in turn, and fits costs to their times.

Microbatches of doubling lengths, rings and blocks warm up until one takes too long; then all of them take turns with
messages and the step's end. Lower quartiles over ranks make the samples (`cost.fit`). It needs no more memory than
training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from math import lcm
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lengthwise.attention import Block, BlockKernel, Saved
from lengthwise.comm import Mesh, Transport, World, share_numbers
from lengthwise.config import OptimizerConfig
from lengthwise.core.errors import MemoryShortage
from lengthwise.core.measurements import Clock, Measurements, Precision, Sample
from lengthwise.core.shape import ModelShape
from lengthwise.cost import shape_from_config
from lengthwise.cost.fit import fit_samples
from lengthwise.cost.measured import base_cost
from lengthwise.engine.batch import random_batch
from lengthwise.engine.norm import clip_factor, gradient_norm
from lengthwise.engine.optimizer import SlicedOptimizer, sliced_optimizer
from lengthwise.engine.parameters import Parameters, lay_parameters, share_values
from lengthwise.engine.slices import Sharding
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import (
    DTYPES,
    Computing,
    ModelSource,
    build_model,
    choose_layers,
    choose_losses,
    choose_mixers,
    choose_model_kernel,
    image_reader,
    left_alone,
    position_limit,
    run_tower,
    score_cap,
    sees_images,
    whole_model,
)
from lengthwise.offload import ActivationStore, DiskStore, PinnedStore
from lengthwise.profiler.model_ends import run_embedding, run_head
from lengthwise.profiler.place import this_place
from lengthwise.profiler.runs import (
    GPU_TIMES,
    IMAGE_TOKENS,
    SHORTEST_TOKENS,
    ProfiledRun,
    copy_runs,
    end_samples,
    local_run,
    message_runs,
    packs_up_to,
    ring_runs,
    sample_of,
)
from lengthwise.profiler.stopwatch import Stopwatch, WatchedTransport

_LONGEST_SHARE = 1 / 25  # largest share of all seconds that one run may take
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 25
_LEAST_TOKENS = 256  # lengths double up to here, however long it takes: shorter runs alone give no fit
_Timed = Callable[[], tuple[float, float, float]]
"""Function that runs something; returns (seconds on this rank, seconds of waits, seconds before backward or NaN)."""

Trained = tuple[nn.Module, Parameters, SlicedOptimizer]
"""A model, its parameters and their optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """The settings of a profile.

    seconds: length of the profile, about. longest_tokens: length of the longest sequence. hardware: named hardware
    whose terms fill gaps. computing: kernels and compilation, as in a run.
    """

    seconds: float
    longest_tokens: int
    precision: Precision
    clock: Clock
    hardware: str
    computing: Computing = field(default_factory=Computing)


def profile(
    source: ModelSource,
    world: World,
    transport: Transport,
    settings: ProfileSettings,
    *,
    trained: Trained | None = None,
    store: ActivationStore | None = None,
) -> Measurements:
    """Measure a model on all ranks of a world; return the same measurements on each.

    trained: model, parameters and optimizer before their first step, which stay equal to the bit (default: built from
    `source`). store: store of offloaded activations; None leaves copies unmeasured.
    """
    shape = shape_from_config(source.config.to_dict(), name=source.name)
    trained = trained or build(source, world, transport, settings.precision, settings.computing)
    devices = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        rank = RankProfiler(*trained, shape, world, transport, settings, store)
        samples = rank.time_in_turns(rank.ladder())
    place = this_place(
        gpu=world.device.index if world.gpus else None,
        ranks=world.world_size,
        ranks_per_node=world.local_size,
        clock=settings.clock,
    )
    adapters = _adapters(trained[0])
    base = base_cost(
        shape,
        settings.hardware,
        precision=settings.precision,
        ranks_per_node=place.ranks_per_node,
        adapters=adapters,
    )
    return Measurements(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        place=place,
        model=shape,
        precision=settings.precision,
        hardware=settings.hardware,
        fit=fit_samples(samples, base, launches_ahead=world.device.type == "cuda"),
        samples=tuple(samples),
        adapters=adapters,
    )


def _adapters(model: nn.Module) -> int | None:
    """Return the number of adapter parameters, or None if the whole model trains."""
    parameters = list(model.parameters())
    if all(parameter.requires_grad for parameter in parameters):
        return None
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def build(
    source: ModelSource,
    world: World,
    transport: Transport,
    precision: Precision,
    computing: Computing | None = None,
) -> Trained:
    """Build a model with random weights, its parameters and optimizer, for measuring. Collective."""
    model = build_model(source, seed=0, stored=transport.rank == 0)
    choose_layers(model, computing or Computing(), world.device, transport, dtype=DTYPES[precision]).put()
    choose_mixers(model, transport, world.device, dtype=DTYPES[precision])
    choose_losses(model, transport, world.device, dtype=DTYPES[precision], computing=computing or Computing())
    if sees_images(whole_model(model)):
        towers, device = left_alone(model).values(), world.device
        share_values(whole_model(model), transport, towers, dtype=DTYPES[precision], device=device)
    parameters = lay_parameters(model, transport, Sharding(dtype=DTYPES[precision], device=world.device))
    return model, parameters, sliced_optimizer(OptimizerConfig(), model, parameters, transport.rank)


def open_store(device: torch.device, folder: Path | None, *, where: str) -> ActivationStore | None:
    """Open the store for activations: a folder, or a GPU's host memory; return None if there is neither."""
    if folder is not None:
        return DiskStore(folder, where=where)
    return PinnedStore(device, where=where) if device.type == "cuda" else None


class RankProfiler:
    """One rank of a profile; all ranks call the same methods in the same order."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Parameters,
        optimizer: SlicedOptimizer,
        shape: ModelShape,
        world: World,
        transport: Transport,
        settings: ProfileSettings,
        store: ActivationStore | None = None,
    ) -> None:
        self._store = store
        self._began = time.perf_counter()
        self._shape, self._world, self._settings, self._dtype = shape, world, settings, DTYPES[settings.precision]
        self._plain, self._model, self._reader = transport, model, image_reader(model)
        self._watch = Stopwatch(settings.clock, transport, world.device)
        self._transport = WatchedTransport(transport, self._watch)
        how = {"dtype": self._dtype, "transport": transport}
        self._kernel: BlockKernel = choose_model_kernel(model.config, settings.computing, world.device, **how)
        self._parameters, self._optimizer = parameters, optimizer

    def time_in_turns(self, runs: Sequence[ProfiledRun]) -> list[Sample]:
        """Run all of these and the step's end in turns while time is left; return samples, ends last."""
        timed = [self._timed(run) for run in runs]
        measured: list[list[tuple[float, float, float]]] = [[] for _ in runs]
        end_took: list[tuple[float, float, float]] = []
        self._end()
        rounds = 0
        while self._agreed(rounds < _LEAST_ROUNDS or self._has_time(rounds)):
            for times, each in zip(measured, timed, strict=True):
                self._meet()
                times.append(each())
            self._meet()
            end_took.append(self._end())
            rounds += 1
        own = torch.tensor([[pair for times in measured for pair in times]], dtype=torch.float64)
        shared = self._shared(own.reshape(len(runs), rounds, 3))
        ends = self._shared(torch.tensor(end_took, dtype=torch.float64))
        clock = self._settings.clock
        return [sample_of(run, shared[:, number], clock) for number, run in enumerate(runs)] + end_samples(ends, clock)

    def _has_time(self, rounds: int) -> bool:
        passed = time.perf_counter() - self._began
        return rounds < _MOST_ROUNDS and passed * (1 + 1 / (rounds + 1)) < self._settings.seconds

    def ladder(self) -> list[ProfiledRun]:
        """Run once, and return, what will be timed; lengths double while a run takes less than its share of time."""
        ranks, layers, longest = self._world.world_size, self._shape.layers, 0
        runs: list[ProfiledRun] = []
        tokens = SHORTEST_TOKENS
        limit = min(self._settings.longest_tokens, position_limit(self._model.config) or self._settings.longest_tokens)
        while tokens <= limit:
            found = [local_run((tokens,), ranks, layers)]
            found += ring_runs((tokens,), ranks, self._world.local_size, layers) if ranks > 1 else []
            if not self._fits(found) and tokens > _LEAST_TOKENS:
                break
            runs += [*found, *(ProfiledRun(kind=kind, lengths=(tokens,)) for kind in ("block", "ring_block"))]
            longest, tokens = tokens, 2 * tokens
        packs = packs_up_to(longest or SHORTEST_TOKENS)
        runs += [local_run(pack, ranks, layers) for pack in packs]
        runs += [ProfiledRun(kind=kind, lengths=(longest or SHORTEST_TOKENS,)) for kind in ("embedding", "head")]
        runs += self._images_ladder()
        times = GPU_TIMES if self._world.device.type == "cuda" else 1
        runs += copy_runs(times=times) if self._store is not None else []
        return runs + (message_runs(ranks, self._world.local_size, times=times) if ranks > 1 else [])

    def _images_ladder(self) -> list[ProfiledRun]:
        """Return runs of images, four times as large each, if all ranks have the tower; run each once."""
        runs, (tokens, most) = list[ProfiledRun](), IMAGE_TOKENS
        if not self._agreed(self._reader is not None) or self._reader is None:
            return runs
        tokens = lcm(tokens, self._reader.least_tokens)
        while tokens <= most:
            run = ProfiledRun(kind="images", lengths=(tokens,), image_work=self._reader.empty_work(tokens))
            if not self._fits([run]) and len(runs) > 1:
                break
            runs.append(run)
            tokens *= 4
        return runs

    def _fits(self, runs: Sequence[ProfiledRun]) -> bool:
        """Run each once; return whether all ran, quickly enough, on all ranks."""
        start = time.perf_counter()
        try:
            for run in runs:
                self._timed(run)()
        except MemoryShortage:  # on all ranks alike, as all hold the same
            return self._agreed(False)
        share = _LONGEST_SHARE * len(runs) * self._settings.seconds
        return self._agreed(time.perf_counter() - start < share)

    def _timed(self, run: ProfiledRun) -> _Timed:
        if run.kind in ("block", "ring_block"):
            return self._block(run.lengths[0], is_diagonal=run.kind == "block")
        if run.kind in ("embedding", "head"):
            return self._end_of_model(run)
        if run.kind == "images":
            return self._images(run.lengths[0])
        if run.kind == "transfer":
            return self._message(run)
        if run.kind == "copy":
            return self._copy(run.num_bytes)
        assert run.plan is not None, run
        batch = random_batch(run.plan.tokens, vocab=self._shape.vocab)
        there = Mesh(self._transport, 1)
        context = StepContext(model=self._model, mesh=there, kernel=self._kernel, name="profile")
        work = partial(run_part, run.plan, batch, context)

        def time_it() -> tuple[float, float, float]:
            self._transport.backward_began = None
            start, waited = self._watch.now(), self._watch.waited
            work()
            end, middle = self._watch.now(), self._transport.backward_began
            return end - start, self._watch.waited - waited, float("nan") if middle is None else middle - start

        return time_it

    def _block(self, tokens: int, *, is_diagonal: bool) -> _Timed:
        """Time the kernel alone on one layer's block, forward and backward; both kinds see as many pairs of tokens."""
        shape, device = self._shape, self._world.device
        q = torch.randn(tokens, shape.heads, shape.head_dim, dtype=self._dtype, device=device)
        keys = tokens if is_diagonal else tokens // 2
        k, v = torch.randn(2, keys, shape.kv_heads, shape.head_dim, dtype=self._dtype, device=device)
        scale, cap = shape.head_dim**-0.5, score_cap(self._model.config)
        block = Block(q=q, k=k, v=v, scale=scale, causal=is_diagonal, softcap=cap)

        def time_it() -> tuple[float, float, float]:
            start = self._watch.now()
            out, lse = self._kernel.forward(block)
            middle = self._watch.now()
            self._kernel.backward(out, block, Saved(out=out, lse=lse))
            return self._watch.now() - start, 0.0, middle - start

        return time_it

    def _end_of_model(self, run: ProfiledRun) -> _Timed:
        """Time the embedding, or the head with its loss, forward and backward."""
        ids = torch.arange(run.lengths[0], device=self._world.device) % self._shape.vocab
        work = partial(run_head if run.kind == "head" else run_embedding, self._model, ids)
        return lambda: (self._watch.seconds(work), 0.0, float("nan"))

    def _images(self, tokens: int) -> _Timed:
        """Time the tower on images of so many tokens, forward, and backward if it trains."""
        assert self._reader is not None, "images are only run where there is a tower"
        images = self._reader.empty(tokens).to(lambda each: each.to(self._world.device))
        work = partial(run_tower, self._model, images)
        return lambda: (self._watch.seconds(work), 0.0, float("nan"))

    def _message(self, run: ProfiledRun) -> _Timed:
        """Time a message to the next rank or node, and one from the other side."""
        size, node, me = self._world.world_size, self._world.local_size, self._world.rank
        if run.tier == "near":
            first = me - me % node
            target, source = first + (me - first + 1) % node, first + (me - first - 1) % node
        else:
            target, source = (me + node) % size, (me - node) % size
        self._plain.connect(sorted({target, source}))
        sent, received = (torch.zeros(run.num_bytes // 4, device=self._world.device) for _ in range(2))

        def time_it() -> tuple[float, float, float]:
            start, waited = self._watch.now(), self._watch.waited
            self._plain.exchange([(sent, target)], [(received, source)]).wait()
            return self._watch.now() - start, self._watch.waited - waited, float("nan")

        return time_it

    def _copy(self, num_bytes: int) -> _Timed:
        """Time copying bytes to the offload store and back, on all ranks at once."""
        values, store = torch.ones(num_bytes, dtype=torch.uint8, device=self._world.device), self._store
        assert store is not None, "copies are only run where there is a store"

        def work() -> None:
            stored = store.put(values)
            stored.take()
            store.free([stored])

        return lambda: (self._watch.seconds(work), 0.0, float("nan"))

    def _end(self) -> tuple[float, float, float]:
        """Run a step's end that changes no weight; return seconds of collectives, update and clearing."""
        parameters, optimizer, watch = self._parameters, self._optimizer, self._watch
        parameters.clear_gradients()

        def publish() -> None:
            parameters.publish()
            parameters.published()

        def update_clipped() -> None:
            optimizer.scale_gradients(clip_factor(1.0, gradient_norm(parameters.grad_shard, self._plain)))
            optimizer.update(0.0)

        with optimizer.rehearsing():
            collectives = watch.seconds(parameters.reduce_gradients)
            waited = watch.waited
            update = watch.seconds(update_clipped)
            waited = watch.waited - waited
            collectives += waited + watch.seconds(publish)
        clear = watch.seconds(parameters.clear_gradients)
        return collectives, max(update - waited, 1e-9), clear

    def _meet(self) -> None:
        self._plain.all_reduce(torch.zeros(1))

    def _agreed(self, yes: bool) -> bool:
        return bool(share_numbers(self._plain, [float(yes)]).all())

    def _shared(self, own: Tensor) -> np.ndarray:
        everyone = torch.empty(self._world.world_size * own.numel(), dtype=torch.float64)
        self._plain.all_gather(everyone, own.contiguous().view(-1))
        return everyone.view(self._world.world_size, *own.shape).numpy()
