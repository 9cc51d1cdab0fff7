"""The order rules, as data: would these grouped calls complete under the strictest reading of a communicator?

Strict means what NCCL means and gloo hides: a rank's groups run one after the other, a group completes only as a
whole, messages between two ranks match in the order in which they were posted, without tags, and a collective needs
all ranks at once. A plan that completes here completes on every backend. `testing.strict` moves tensors by these rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Plan
from lengthwise.engine.wave_order import END, GATHER, REDUCE, UnitKind, backward_calls, forward_calls
from lengthwise.program.lower import MicrobatchProgram, last_on_all_ranks, lower_plan
from lengthwise.program.records import Content, MutualSpans, Round, Transfer
from lengthwise.program.ring_order import line_peers
from lengthwise.program.spans import Mixing, far_peers, halo_round, sweep_rounds

CONNECTIONS = "connections"  # label of the group that meets ranks
Layer = int | Mixing | None
"""The sliding window of an attention layer (None: without one), or what a layer of another kind passes along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One side of a message ("send", "receive"), or a rank's part in a "collective".

    `size` (of a collective: which one, and its sizes), `key` and `peer` must agree with the other side; `payload` is
    carried through untouched. members: the ranks of a collective; empty: all. key: of a collective that may run beside
    messages.
    """

    kind: str
    peer: int = -1
    members: tuple[int, ...] = ()
    size: object = 0
    key: object = None
    payload: Any = None


@dataclass(eq=False, slots=True, kw_only=True)
class Group:
    """Operations that a rank posted together; done when all of them are matched."""

    label: str
    operations: tuple[Operation, ...]
    unmatched: set[int] = field(default_factory=set)

    @property
    def done(self) -> bool:
        """Whether every operation has met its other side."""
        return not self.unmatched


class StrictMatcher:
    """Match grouped operations of all ranks; a rank's next group waits until its present one is complete.

    NCCL makes connections in the first call that needs them, and the host waits for the other side meanwhile, whatever
    it holds up. So messages need an edge that was met before: at the start those of the line are. And a collective with
    a key needs one before it without: of the same kind, sizes and members.
    """

    def __init__(self, world_size: int) -> None:
        self._queues: list[deque[Group]] = [deque() for _ in range(world_size)]
        self._met = {("", rank): set(line_peers(rank, world_size)) for rank in range(world_size)}
        self._called: list[set[object]] = [set() for _ in range(world_size)]

    def meet(self, rank: int, peers: Sequence[int], *, order: str = "") -> list[int]:
        """Let `rank` have edges to these ranks; return the new ones, with which it exchanges a message at once.

        order: of transfers, in which they have edges; "" is the world's.
        """
        met = self._met.setdefault((order, rank), set())
        new = [peer for peer in peers if peer not in met]
        met.update(new)
        return new

    def post(self, rank: int, label: str, operations: Sequence[Operation], *, order: str = "") -> Group:
        """Queue one group of `rank`; order: as for `meet`.

        Raises:
            PlanError: it would make a connection (see the class).
        """
        for each in operations:
            self._refuse_connecting(rank, label, each, self._met.get((order, rank), set()))
        group = Group(label=label, operations=tuple(operations), unmatched=set(range(len(operations))))
        self._queues[rank].append(group)
        return group

    def _refuse_connecting(self, rank: int, label: str, operation: Operation, met: Collection[int]) -> None:
        where = f"rank {rank}, {label}"
        if operation.kind != "collective":
            if operation.peer not in met:
                expected = f"a message to or from one of ranks {sorted(met)}, which it has met"
                remedy = "Call `connect` on both ranks, before the first message of the step."
                raise PlanError(where, expected=expected, got=f"rank {operation.peer}", remedy=remedy)
            return
        call = (operation.members, operation.size)
        if operation.key is None:
            self._called[rank].add(call)
        elif call not in self._called[rank]:
            expected, got = "a call as one before it without a key", f"the first of {operation.size}"
            raise PlanError(where, expected=expected, got=got, remedy="Make one at the start, beside no messages.")

    def progress(self) -> Iterator[tuple[list[Operation], list[Operation]]]:
        """Yield matched operations, senders (or all of a collective) first, until nothing more can be matched.

        Raises:
            PlanError: two sides of a message, or two parts of a collective, disagree about its size.
        """
        moved = True
        while moved:
            moved = False
            for source in range(len(self._queues)):
                for pair in self._match_from(source):
                    moved = True
                    yield pair
            for members in dict.fromkeys(self._collectives_ahead()):
                collective = self._match_collective(members)
                if collective is not None:
                    moved = True
                    yield collective, collective
            for queue in self._queues:
                while queue and queue[0].done:
                    queue.popleft()
                    moved = True

    def stuck(self) -> dict[int, str]:
        """Name the group in which each rank with unfinished work waits."""
        return {rank: queue[0].label for rank, queue in enumerate(self._queues) if queue}

    def _match_from(self, source: int) -> Iterator[tuple[list[Operation], list[Operation]]]:
        if not self._queues[source]:
            return
        sending, blocked = self._queues[source][0], set()
        for i in sorted(sending.unmatched):
            send = sending.operations[i]
            if send.kind != "send" or send.peer in blocked:
                continue
            receiving = self._queues[send.peer][0] if self._queues[send.peer] else None
            j = None if receiving is None else _next_receive(receiving, source)
            if receiving is None or j is None:
                blocked.add(send.peer)  # a later message to the same peer must not overtake this one
                continue
            receive = receiving.operations[j]
            if send.size != receive.size:
                where, expected = f"rank {source} to rank {send.peer}", f"{receive.size} in {receiving.label}"
                remedy = "The two sides pair different messages: the program is wrong."
                raise PlanError(where, expected=expected, got=f"{send.size} in {sending.label}", remedy=remedy)
            sending.unmatched.discard(i)
            receiving.unmatched.discard(j)
            yield [send], [receive]

    def _collectives_ahead(self) -> Iterator[tuple[int, ...]]:
        """Yield the members of the collectives that ranks have come to."""
        for queue in self._queues:
            if queue and queue[0].operations and queue[0].operations[0].kind == "collective" and not queue[0].done:
                yield queue[0].operations[0].members

    def _match_collective(self, members: tuple[int, ...]) -> list[Operation] | None:
        ranks = members or range(len(self._queues))
        heads = [self._queues[rank][0] if self._queues[rank] else None for rank in ranks]
        operations = []
        for head in heads:
            if head is None or head.done or head.operations[0].kind != "collective":
                return None
            if head.operations[0].members != members:  # in another communicator: it waits there
                return None
            operations.append(head.operations[0])
        for rank, operation in zip(ranks, operations, strict=True):
            ours, first = ((each.size, each.key) for each in (operation, operations[0]))
            if ours != first:
                expected, got = f"{first}, as on rank {ranks[0]}", str(ours)
                remedy = "All ranks must make the same collective calls in the same order."
                raise PlanError(f"rank {rank}, collective", expected=expected, got=got, remedy=remedy)
        for head in heads:
            assert head is not None
            head.unmatched.clear()
        return operations


def _next_receive(group: Group, source: int) -> int | None:
    waiting = ((i, group.operations[i]) for i in sorted(group.unmatched))
    return next((i for i, each in waiting if each.kind == "receive" and each.peer == source), None)


def check_order(
    plan: Plan,
    *,
    layers: int = 1,
    windows: Sequence[Layer] | None = None,
    counts_routers: bool = False,
    tied: bool = False,
    ranks_per_node: int | None = None,
    mutual: MutualSpans | None = None,
) -> int:
    """Run the grouped calls of one step of `plan` under strict matching; return how many messages were matched.

    Each rank connects to whom it needs and posts, for its microbatches in order, the forward and the backward rounds of
    every layer, between them what recomputation runs again, and last the step-end collective. `windows` says what each
    layer is (default: `layers` layers of full attention). `counts_routers`: the counting pass of a model
    with a router balance loss comes first (`program.step_program`). In a plan of kind `waves` every rank runs all
    microbatches of its node's ranks (`ranks_per_node`; None: of all), and gathers and reduces units between rounds, as
    `engine.unit_waves` does; `tied`: all that is in no layer is one unit. `mutual`: that of `lower_plan`.

    Raises:
        PlanError: the ranks would wait for each other for ever; it names the ranks and what they wait in.
    """
    matcher = StrictMatcher(plan.ranks)
    windows = [None] * layers if windows is None else windows
    for rank in range(plan.ranks):
        groups = rank_groups(
            plan,
            rank,
            windows=windows,
            counts_routers=counts_routers,
            tied=tied,
            ranks_per_node=ranks_per_node,
            mutual=mutual,
        )
        for label, operations in groups:
            if label == CONNECTIONS:
                matcher.meet(rank, [each.peer for each in operations])
            matcher.post(rank, label, operations)
    matched = sum(1 for senders, _ in matcher.progress() if senders[0].kind == "send")
    stuck = matcher.stuck()
    if stuck:
        waits = "; ".join(f"rank {rank} in {label}" for rank, label in list(stuck.items())[:5])
        where, remedy = "plan: order", "All ranks must run their microbatches in one global order."
        raise PlanError(where, expected="every grouped call to complete", got=f"a deadlock: {waits}", remedy=remedy)
    return matched


def rank_groups(
    plan: Plan,
    rank: int,
    *,
    windows: Sequence[Layer],
    counts_routers: bool = False,
    tied: bool = False,
    ranks_per_node: int | None = None,
    mutual: MutualSpans | None = None,
) -> Iterator[tuple[str, list[Operation]]]:
    """Yield (label, operations) of every grouped call that `rank` makes in a step, in order."""
    gathers = plan.schedule["kind"] == "waves"
    units = _units(len(windows), tied=tied) if gathers else []
    in_step = (ranks_per_node or plan.ranks) if gathers else 1
    node = range(rank - rank % in_step, rank - rank % in_step + in_step)
    programs = lower_plan(plan, rank, ranks_in_step=in_step, mutual=mutual)
    for unit in {each.name: each for each in units}.values():
        for kind in (GATHER, REDUCE):
            yield "start", [_unit_call(kind, unit, node)]
    mixing = [each for each in windows if isinstance(each, Mixing)]
    most = Mixing(has_states=any(x.has_states for x in mixing), width=max((x.width for x in mixing), default=1))
    if peers := far_peers(programs, rank, most):
        yield CONNECTIONS, [Operation(kind=kind, peer=peer) for kind in ("send", "receive") for peer in peers]
    if counts_routers:
        kept = last_on_all_ranks(plan, ranks_in_step=in_step)
        for program in programs:
            name = "forward" if program.index in kept else "counting"
            yield from _pass_groups(program, rank, name, windows, units, node)
        yield "sum of counts", [Operation(kind="collective")]
        for program in (each for each in programs if each.index in kept):
            yield from _pass_groups(program, rank, "backward", windows, units, node)
        programs = [each for each in programs if each.index not in kept]
    for program in programs:
        yield from _pass_groups(program, rank, "forward", windows, units, node)
        yield from _pass_groups(program, rank, "backward", windows, units, node)
    yield "step end", [Operation(kind="collective")]


def _units(layers: int, *, tied: bool) -> list[UnitKind]:
    first, last = UnitKind(name="first", stays=tied), [UnitKind(name="last", stays=True)]
    return [first, *(UnitKind(name="layer", again=True) for _ in range(layers)), *([] if tied else last)]


def _pass_groups(
    program: MicrobatchProgram, rank: int, name: str, windows: Sequence[Layer], units: Sequence[UnitKind], node: range
) -> Iterator[tuple[str, list[Operation]]]:
    """Yield the groups of a pass. units: what is gathered in it by a node; none: all parameters are there."""
    rounds = dict(_layer_groups(program, rank, name, windows))
    if not units:
        yield from (each for of_layer in rounds.values() for each in of_layer)
        return
    entries = backward_calls(units) if name == "backward" else enumerate(forward_calls(units))
    for entered, calls in entries:
        for call in calls:
            label = f"microbatch {program.index}, {name}, {call.kind} of unit {call.unit}"
            yield label, [_unit_call(call.kind, units[call.unit], node, key=label)]
        yield from rounds.get(entered - 1, ()) if entered != END else ()


def _unit_call(kind: str, unit: UnitKind, node: range, key: str | None = None) -> Operation:
    return Operation(kind="collective", size=(kind, unit.name), key=key, members=tuple(node))


def _layer_groups(
    program: MicrobatchProgram, rank: int, name: str, windows: Sequence[Layer]
) -> Iterator[tuple[int, list[tuple[str, list[Operation]]]]]:
    """Yield each layer of a pass, in its order, with the rounds that this rank takes part in."""
    lowered = {window: program.with_window(window) for window in set(windows) if not isinstance(window, Mixing)}
    layers = range(len(windows))
    kinds = [name]
    if name == "backward":
        heads = dict.fromkeys(("all_but_attention", "elementwise"), ("heads again",))
        again = {"layer": ("forward again",), **heads}.get(program.microbatch.recompute, ())
        kinds, layers = [*again, name], layers[::-1]
    for layer in layers:
        found = []
        for kind in kinds:
            of_layer = windows[layer]
            if isinstance(of_layer, Mixing):
                rounds = _mixing_rounds(program, kind, of_layer)
            else:
                rounds = _pass_rounds(lowered[of_layer], kind)
            for label, each in rounds:
                operations = [_operation(t, rank) for t in each.transfers if rank in (t.source, t.target)]
                if operations:
                    found.append((f"microbatch {program.index}, layer {layer}, {kind}, {label}", operations))
        yield layer, found


def _pass_rounds(program: MicrobatchProgram, kind: str) -> Iterator[tuple[str, Round]]:
    """Yield the rounds of one layer: heads are split, the ring turns, heads are joined."""
    if kind == "heads again":  # attention was kept, what it reads was not
        yield "heads split", program.exchange(Content.QKV_OUT)
        return
    is_backward = kind == "backward"
    before, after = (Content.GRAD_OUT, Content.DQKV) if is_backward else (Content.QKV, Content.OUT)
    yield "heads split", program.exchange(before)
    for ring_step, each in enumerate(program.backward_rounds if is_backward else program.forward_rounds):
        yield f"ring step {ring_step}", each
    yield "heads joined", program.exchange(after)


def _mixing_rounds(program: MicrobatchProgram, kind: str, mixing: Mixing) -> Iterator[tuple[str, Round]]:
    """Yield the rounds of a layer that is no attention; one that runs again has kept what it received."""
    halo = halo_round(program, mixing.width)
    sweep = sweep_rounds(program) if mixing.has_states else ()
    states = [(f"sweep {number}", each) for number, each in enumerate(sweep)]
    if kind in ("forward", "counting"):
        yield from [("halo", halo), *states]
    elif kind == "backward":
        yield from [*states, ("halo", halo.turned())]


def _operation(transfer: Transfer, rank: int) -> Operation:
    size = (transfer.content, transfer.tokens, transfer.heads)
    if transfer.source == rank:
        return Operation(kind="send", peer=transfer.target, size=size)
    return Operation(kind="receive", peer=transfer.source, size=size)
