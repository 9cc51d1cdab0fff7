"""What a wave takes with its gathers and sums: by hand, and against the order in which the engine posts them."""

from dataclasses import replace
from itertools import product

import pytest
from testing.fake_nccl import Call, Compute, FakeNccl, Item, Wait
from testing.order import Operation

from lengthwise.cost import all_terms_cost, named_hardware, named_shape, sharded_cost, sharded_traffic, step_memory
from lengthwise.cost.ending import Traffic
from lengthwise.engine.wave_order import END, GATHER, REDUCE, UnitCall, UnitKind, backward_calls, forward_calls

SHAPE, H100 = named_shape("llama-3.1-8b"), named_hardware("h100")


@pytest.mark.parametrize("ties", [False, True])
def test_a_wave_takes_what_the_posted_calls_take_one_after_the_other(ties: bool) -> None:
    """One queue of calls beside the layers of two ranks, posted where `wave_order` says."""
    times = product((1, 4), (0.0, 1.0, 3.0), (0.5, 2.0), (1.0, 4.0), (0.0, 2.5), (3.5,))
    for layers, work, gather, reduce, rest, head in times:
        head = 0.0 if ties else head
        seconds = {GATHER: [rest, *[gather] * layers], REDUCE: [2 * rest, *[reduce] * layers]}
        units = [UnitKind(name="rest", stays=ties), *[UnitKind(name="layer", again=True)] * layers]
        if not ties:
            units.append(UnitKind(name="head", stays=True))
            seconds[GATHER].append(head)
            seconds[REDUCE].append(1.5 * head)
        traffic = Traffic(
            layers=layers, gather_seconds=gather, reduce_seconds=reduce, rest_gather_seconds=rest,
            rest_reduce_seconds=2 * rest, head_gather_seconds=head, head_reduce_seconds=1.5 * head,
        )  # fmt: skip
        took = _run(units, seconds, work).seconds
        assert traffic.wave_seconds(work * layers, 2 * work * layers) == pytest.approx(took)


def test_layers_that_mixed_precision_gathers_narrow_take_the_time_of_narrow_ones() -> None:
    cost = all_terms_cost(SHAPE, H100)
    wide, narrow = (replace(step_memory(SHAPE, H100, 8), shard="zero3", dtype_bytes=width) for width in (4, 2))
    found = sharded_traffic(replace(wide, layer_bytes=2), cost)
    assert found == replace(sharded_traffic(wide, cost), gather_seconds=sharded_traffic(narrow, cost).gather_seconds)
    assert found.gather_seconds < 0.6 * sharded_traffic(wide, cost).gather_seconds


def _run(units: list[UnitKind], seconds: dict[str, list[float]], work: float) -> FakeNccl:
    """Run a wave whose layers take `work` forward and twice that backward, half of it on the other rank."""
    return FakeNccl([_wave(units, seconds, work), _wave(units, seconds, work / 2)])


def _wave(units: list[UnitKind], seconds: dict[str, list[float]], work: float) -> list[Item]:
    """List what `engine.unit_waves` gives a device."""
    items, calls = list[Item](), list[Call]()

    def enter(posted: list[UnitCall], unit: int, takes: float) -> None:
        for each in posted:
            if each.kind == REDUCE:  # one at a time
                items.extend(Wait(call=call) for call in calls if call.label[0] == REDUCE)
            operation = Operation(kind="collective", size=each, payload=seconds[each.kind][each.unit])
            calls.append(Call(communicator="gpus", operations=[operation], ctas=16, label=each))
            items.append(calls[-1])
        items.extend(Wait(call=call) for call in calls if call.label == (GATHER, unit))
        items.append(Compute(label=len(items), seconds=takes))

    for number, posted in enumerate(forward_calls(units)):
        enter(posted, number, work if units[number].again else 0.0)
    for number, posted in backward_calls(units):
        enter(posted, number, 0.0 if number == END else 2 * work)
    return [*items, *(Wait(call=call) for call in calls)]


def test_costs_of_sharded_ranks_have_no_sum_at_the_end_but_that_of_copies() -> None:
    """Over a node of eight parameters travel inside it; what nodes have to sum is what whole parameters would be."""
    memory = replace(step_memory(SHAPE, H100, 64), shard="zero3")
    plain = all_terms_cost(SHAPE, H100)
    zero3, hybrid = sharded_cost(plain, memory), sharded_cost(plain, memory, group=8)
    assert zero3.step_end_seconds(64) == 0.0
    assert hybrid.step_end_seconds(64) == plain.step_end_seconds(64) > 0
    assert zero3.traffic is not None
    assert hybrid.traffic == sharded_traffic(replace(memory, ranks=8), plain, head_apart=True)
    assert hybrid.traffic.gather_seconds != zero3.traffic.gather_seconds
    assert sharded_cost(plain, replace(memory, ranks=1)) == plain
    assert plain.wave_seconds(3.0, "none") == 3.0
