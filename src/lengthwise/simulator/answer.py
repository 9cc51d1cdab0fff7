"""The short answer of a simulation: what people use today, each at its own best settings, against Lengthwise.

Without tensor parallelism or stages: FSDP2 with padding, with packing, and with one size of ring (`rivals`), packs in
the order of a shuffled set or, with one's own sampler, sorted by work; and Lengthwise as it trains by default: with the
fastest layout that fits (hybrid as if all nodes ran in lock-step), microbatches as memory allows. All are planned,
simulated and searched alike (`mesh_search`). A few seconds for 8 devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from lengthwise.core.errors import MemoryShortage
from lengthwise.core.plan import Plan
from lengthwise.core.timeline import Timeline
from lengthwise.cost import choose_shard, wanted_tokens
from lengthwise.cost.shard_choice import Shard
from lengthwise.planner import arithmetic_seconds
from lengthwise.simulator.layouts import MOST_RANKS, layout_seconds
from lengthwise.simulator.mesh_search import Search
from lengthwise.simulator.meshes import Found, Question, RankMesh
from lengthwise.simulator.rivals import ONE_RING, PACKED, RIVALS, lock_steps
from lengthwise.simulator.ways import BY_WORK, LAYOUTS, OURS, Answer, WayRow, WaySettings, WorkSpan

Batches = Sequence[Sequence[int]]


def answer(batches: Batches, question: Question) -> Answer:
    """Compare the four ways on the same batches, entry i of each the length of sequence i in tokens."""
    rows = [_rival(name, batches, question) for name in (RIVALS if question.devices > 1 else RIVALS[:-1])]
    if question.devices > 1:
        by_work = [_rival(name, batches, question, by_work=True) for name in (PACKED, ONE_RING)]
        rows.append(replace(_quickest(by_work), name=BY_WORK))
    layouts = compare_layouts(batches, question)
    auto = auto_layout(batches, question, layouts)
    taken = [row for row in layouts if auto and row.layout == auto]
    return Answer(
        rows=(*rows, _quickest(taken or layouts)),
        layouts=tuple(layouts),
        auto=auto,
        devices=question.devices,
        hardware=question.hardware.name,
        kernel="" if question.cost else question.hardware.kernel,
        batch_tokens=round(sum(map(sum, batches)) / len(batches)),
        longest=max(map(max, batches)),
        only_attends=not question.shape.mixer_kept,
    )


def _quickest(rows: Sequence[WayRow]) -> WayRow:
    """Return the quickest row; where none fits, the last."""
    return min((row for row in rows if row.step_seconds), key=lambda row: row.mean_seconds, default=rows[-1])


def auto_layout(batches: Batches, question: Question, rows: Sequence[WayRow]) -> str:
    """Return the layout that a run takes by itself, whose steps take as `rows` say; "": none without offload.

    For more ranks than a run plans when it chooses, by what it goes by, of one batch.
    """
    longest, whole = max(map(max, batches)), RankMesh()
    tokens, kinds = question.capacity_tokens or wanted_tokens(question.devices, longest=longest), question.kinds
    took = {row.layout: row.mean_seconds for row in rows if row.settings and not row.settings.offloads}
    cost, room = question.cost_of(whole), question.hardware.device_bytes
    estimated = layout_seconds(batches[0], cost, room, kinds=kinds, capacity_tokens=question.capacity_tokens)
    try:
        found = choose_shard(
            question.memory(whole),
            room,
            tokens=tokens,
            kinds=kinds,
            seconds=estimated if question.devices > MOST_RANKS else lambda laid: took.get(laid.shard, inf),
        )
    except MemoryShortage:
        return ""
    return found.shard if found.shard in took else ""


def compare_layouts(batches: Batches, question: Question) -> list[WayRow]:
    """Run Lengthwise with each layout that exists here, in the order of `LAYOUTS`."""
    rows: list[WayRow] = []
    is_node = question.devices <= question.cost_of(RankMesh()).ranks_per_node
    for layout in LAYOUTS[:1] if question.devices == 1 else LAYOUTS[:2] if is_node else LAYOUTS:
        like = rows[-1].settings if layout == "hybrid" else None  # which gathers in the same waves as zero3
        rows.append(_ours(layout, batches, question, like=like and like.recompute))
    return rows


def _rival(name: str, batches: Batches, question: Question, *, by_work: bool = False) -> WayRow:
    """Run one of `RIVALS` at its best settings; `by_work`: packs of like work side by side."""
    capacities, search = question.held("zero3"), Search(planner=name, batches=batches, question=question)
    tries = lock_steps(name, batches, question.devices, capacities, by_work=by_work)
    meshes = [RankMesh(layout="zero3", held=((kind, held),), lock_step=how) for kind, held, how in tries]
    return _row(name, search.quickest(meshes)) or WayRow(name=name, refusal=_too_long(name, batches, question, "zero3"))


def _ours(layout: Shard, batches: Batches, question: Question, *, like: str | None = None) -> WayRow:
    """Run Lengthwise with a layout: offloading only where nothing holds the sequences without.

    like: the kind of recomputation that is taken where it holds them.
    """
    search, capacities = Search(planner="lengthwise", batches=batches, question=question), question.held(layout)
    cost = question.cost_of(RankMesh(layout=layout))
    held = tuple(sorted(capacities.items(), key=lambda each: arithmetic_seconds(batches[0], cost, each[0])))
    first = tuple(each for each in held if each[0] == like)
    for some, offload in ((first, "off"), (held, "off"), (held, "auto")):
        mesh = RankMesh(layout=layout, held=some, heads="auto", offload=offload)
        if some and (row := _row(OURS, search.quickest([mesh]))):
            return row
    return WayRow(name=OURS, refusal=_too_long(ONE_RING, batches, question, layout))


def _too_long(name: str, batches: Batches, question: Question, layout: Shard) -> str:
    longest, capacities = max(map(max, batches)), question.held(layout)
    if not capacities:
        states = question.memory(RankMesh(layout=layout)).state_bytes() / 1e9
        return f"no room beside {states:.0f} GB of parameters and states on each GPU"
    most = max(capacities.values())
    if name == ONE_RING:
        return f"longest sequence {longest:,}, all GPUs hold {question.devices * most:,}"
    return f"longest sequence {longest:,}, a GPU holds {most:,}"


def _row(name: str, found: Found | None) -> WayRow | None:
    if found is None:
        return None
    mesh, steps, plan = found.mesh, found.result.steps, found.result.first_plan
    how, kind = mesh.lock_step, steps[0].recompute
    settings = WaySettings(
        recompute=kind,
        capacity_tokens=dict(mesh.held)[kind],
        size=how and how.size,
        by_length=how.by_length if how and how.size else None,
        degree=how.degree if how and not how.size else None,
        sorted=how is not None and how.by_work,
        layout=None if how else mesh.layout,
        offloads=any(step.most_offload > 0 for step in steps),
    )
    return WayRow(
        name=name,
        settings=settings,
        step_seconds=tuple(step.step_seconds for step in steps),
        memory_bytes=max(step.memory_bytes for step in steps),
        stretches=tuple(_stretches(plan, found.result.first)),
        degrees=() if how else _degrees(plan),
    )


def _degrees(plan: Plan) -> tuple[tuple[int, int], ...]:
    pieces = (piece for microbatch in plan.microbatches for piece in microbatch.pieces)
    return tuple(sorted({(plan.tokens[i], piece.degree) for piece in pieces for i in piece.sequences}))


def _stretches(plan: Plan, timeline: Timeline) -> Iterator[WorkSpan]:
    ends, rings = timeline.start + timeline.busy_seconds, list[frozenset[int]]()
    for microbatch in plan.microbatches:
        rings.append(frozenset(rank for piece in microbatch.pieces if piece.degree > 1 for rank in piece.ranks))
    rows = zip(timeline.rank, timeline.microbatch, timeline.start, ends, strict=True)
    for rank, number, start, end in rows:
        kind = "ring" if int(rank) in rings[int(number)] else "local"
        yield WorkSpan(rank=int(rank), start=float(start), end=float(end), kind=kind)
