"""A session's `state_dict`: whole tensors by parameter, in the form of the loop's own optimizer.

A state fits any number of ranks and a plain loop: a plain optimizer loads it, and a session loads a plain loop's state.
Tensors travel one bucket or parameter at a time, and only rank 0 keeps them, in host memory. A state is checked whole
before anything changes; one step over two entries shows which states the optimizer keeps.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lengthwise.checkpoint.part import NOT_NEGATIVE
from lengthwise.comm import Transport, from_first, share_names
from lengthwise.core.errors import ConfigError, LengthwiseError, raise_problems
from lengthwise.engine.optimizer import SlicedOptimizer, is_by_entry, plain_value
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.slices import gathered, in_buckets
from lengthwise.engine.whole_optimizer import MEMBERS, kept_of
from lengthwise.session.misuse import is_number, is_whole, shown

STATE, GROUPS = "state", "param_groups"
_SHOWN = 10  # parameters that differ
_REMEDY = "Give rank 0 the result of state_dict for this model and optimizer."


def whole_state(optimizer: SlicedOptimizer, transport: Transport) -> dict[str, Any]:
    """Return on rank 0 torch's `Optimizer.state_dict` of the whole parameters; {} on other ranks. Collective."""
    optimizer.take_changes()
    parameters = optimizer.parameters
    sizes = parameters.layout.sizes
    vectors, numbers = _kinds(optimizer, transport)
    table = torch.full((len(sizes), 1 + len(numbers)), math.nan, dtype=torch.float64)
    for run, state in optimizer.states():
        if state:
            table[run.parameter, 0] = 1.0
        for column, key in enumerate(numbers, start=1):
            if key in state:
                table[run.parameter, column] = float(state[key])
    rows = torch.empty(transport.world_size, *table.shape, dtype=torch.float64)
    if sizes:
        transport.all_gather(rows.view(-1), table.view(-1))
    found: dict[int, dict[str, Any]] = {}
    kept = {name for name, is_kept in zip(parameters.names, (~rows[:, :, 0].isnan()).any(0), strict=True) if is_kept}
    for key in vectors:
        shard = torch.zeros_like(parameters.master_weights)
        for run, state in optimizer.states():
            if key in state:
                shard[run.start : run.stop].copy_(state[key])
        whole = gather_to_first(parameters, shard, transport)
        for name, values in whole.items():
            if name not in kept:
                continue  # no loss has reached it
            found.setdefault(optimizer.numbers[name], {})[key] = values
    if transport.rank:
        return {}
    for column, key in enumerate(numbers, start=1):
        for place, values in enumerate(rows[:, :, column].T):
            known = values[~values.isnan()]
            if len(known):
                found.setdefault(optimizer.numbers[parameters.names[place]], {})[key] = known[0].float()
    return {STATE: found, GROUPS: optimizer.plain_groups()}


def gather_to_first(parameters: Parameters, shard: Tensor, transport: Transport) -> dict[str, Tensor]:
    """Gather all ranks' shards, (entries,), to whole tensors by parameter on rank 0's host; {} on others. Collective.

    It takes a bucket at a time.
    """
    slices = in_buckets(parameters.layout, shard)
    found = gathered(parameters.layout, slices, transport, device=parameters.grad_shard.device)
    if transport.rank:
        deque(found, maxlen=0)
        return {}
    names, shapes = parameters.names, parameters.shapes
    return {names[index]: each.view(shapes[index]).to("cpu", copy=True) for index, each in found}


def _set_master_weights(parameters: Parameters, rank: int, place: int, whole: Tensor) -> None:
    for run in parameters.layout.runs(rank):
        if run.parameter == place:
            parameters.master_weights[run.start : run.stop].copy_(whole[run.entry : run.entry + run.stop - run.start])


def take_state(
    optimizer: SlicedOptimizer,
    transport: Transport,
    state: Mapping[str, Any] | None,
    names_inside: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> int:
    """Give each rank its slices of rank 0's state: a whole optimizer's state dict, and weights by name. Collective.

    Without weights the present ones stay. names_inside: function that removes the wrap's prefix from names. transport:
    transport over all ranks, which may be stages.

    Raises:
        ConfigError, Problems: the state is of other parameters or groups; nothing was changed.

    Returns:
        The number of steps that the state had made.
    """
    parameters, rank = optimizer.parameters, optimizer.rank
    places = {name: place for place, name in enumerate(parameters.names)}
    given = weights = None  # of rank 0

    def read() -> dict[str, Any]:
        nonlocal given, weights
        try:
            problems, found = _checked(state, optimizer, names_inside)
        except Exception as error:  # noqa: BLE001 - of a form not thought of; the other ranks would wait
            wrong = _wrong("state", "the result of state_dict", f"{type(error).__name__}: {error}")
            problems, found = [wrong], None
        raise_problems(problems)
        assert found is not None, "else there are problems"
        sent, given, weights = found
        return sent

    sent = from_first(transport, read)
    optimizer.set_groups(sent["groups"])
    for name, number in optimizer.numbers.items():
        states, place, entries = dict[str, Tensor](), places.get(name), math.prod(optimizer.shapes[name])
        for key in sent["keys"][str(number)]:
            value = None if given is None else torch.as_tensor(given[STATE][number][key])
            states[key] = _sent(value, entries, parameters, transport)
        if place is not None:
            optimizer.set_states(place, states)
        if sent["weights"]:
            own = None if weights is None else weights[name]
            whole = _sent(own, entries, parameters, transport)
            if place is not None:
                _set_master_weights(parameters, rank, place, whole)
    return sent["steps"]


def _checked(
    state: Any, optimizer: SlicedOptimizer, names_inside: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
) -> tuple[list[LengthwiseError], tuple[dict[str, Any], Mapping[str, Any], Mapping[str, Tensor] | None] | None]:
    """Return a state's problems; without any also its summary for all ranks, its optimizer's state and its weights."""
    problems = _problems_of_form(state)
    if problems:
        return problems, None
    given, weights = state["optimizer"], state.get("master_weights")
    weights = None if weights is None else names_inside(weights)
    problems = [*_problems_of_optimizer(given, optimizer), *_problems_of_weights(weights, optimizer.shapes)]
    if problems:
        return problems, None
    groups = [{key: plain_value(value) for key, value in each.items() if key != MEMBERS} for each in given[GROUPS]]
    sent = {
        "steps": int(state.get("steps", 0)),
        "groups": groups,
        "keys": {number: sorted(_states_of(given, number)) for number in optimizer.numbers.values()},
        "weights": weights is not None,
    }
    return [], (sent, given, weights)


def _kinds(optimizer: SlicedOptimizer, transport: Transport) -> tuple[list[str], list[str]]:
    """Return the names of the states of all ranks with one number per entry, and the names of the other states."""
    vectors, numbers = set[str](), set[str]()
    for run, state in optimizer.states():
        for key, value in state.items():
            if value is not None:
                (vectors if is_by_entry(value, run) else numbers).add(key)
    vectors = share_names(transport, vectors)  # a rank may have states of parameters that other ranks lack
    return vectors, [name for name in share_names(transport, numbers) if name not in vectors]


def _sent(value: Tensor | None, entries: int, parameters: Parameters, transport: Transport) -> Tensor:
    """Return rank 0's value on every rank: flat, one number per entry of a parameter, or a single number."""
    device = parameters.grad_shard.device  # masters may be on the host
    is_vector = torch.tensor([0 if value is None else int(value.dim() > 0)])
    transport.broadcast(is_vector, 0)
    if not int(is_vector):
        number = torch.zeros(1, dtype=torch.float64) if value is None else value.double().reshape(1).cpu()
        transport.broadcast(number, 0)
        return number[0].float()
    whole = torch.empty(entries, dtype=parameters.master_weights.dtype, device=device)
    if value is not None:
        whole.copy_(value.reshape(-1))
    transport.broadcast(whole, 0)
    return whole


def _problems_of_form(state: object) -> list[LengthwiseError]:
    if not isinstance(state, Mapping):
        return [_wrong("state", "the result of state_dict, on rank 0", shown(state))]
    problems: list[LengthwiseError] = []
    steps, weights, optimizer = state.get("steps", 0), state.get("master_weights"), state.get("optimizer")
    count = steps.item() if isinstance(steps, Tensor) and steps.numel() == 1 and not steps.is_meta else steps
    if not is_whole(count) or not 0 <= count < 1 << 63:
        problems.append(_wrong("state, steps", "a whole number of 0 or more", shown(steps)))
    if weights is not None and (not isinstance(weights, Mapping) or not all(isinstance(each, str) for each in weights)):
        problems.append(_wrong("state, master_weights", "tensors by the names of parameters", shown(weights)))
    if not isinstance(optimizer, Mapping) or not {STATE, GROUPS} <= optimizer.keys():
        got = ", ".join(map(str, optimizer)) or "an empty one" if isinstance(optimizer, Mapping) else shown(optimizer)
        problems.append(_wrong("state, optimizer", f"{STATE} and {GROUPS}", got))
    elif not isinstance(optimizer[STATE], Mapping):
        problems.append(
            _wrong("state, optimizer, state", "states by the number of a parameter", shown(optimizer[STATE]))
        )
    elif not _are_groups(optimizer[GROUPS]):
        problems.append(_wrong(f"state, {GROUPS}", f"a list of groups with {MEMBERS}", shown(optimizer[GROUPS])))
    return problems


def _are_groups(groups: object) -> bool:
    return isinstance(groups, list | tuple) and all(isinstance(each, Mapping) and MEMBERS in each for each in groups)


def _problems_of_optimizer(given: Mapping[str, Any], optimizer: SlicedOptimizer) -> list[LengthwiseError]:
    own_groups, groups = optimizer.plain_groups(), given[GROUPS]
    wanted, got = ([list(group[MEMBERS]) for group in each] for each in (own_groups, groups))
    if wanted != got:
        counts = [f"{len(each)} groups of {', '.join(str(len(one)) for one in each)}" for each in (wanted, got)]
        return [_wrong(f"state, {GROUPS}", counts[0], counts[1])]
    problems: list[LengthwiseError] = [
        _wrong(f"state, {GROUPS}, {number}, {key}", expected, shown(group.get(key)))
        for number, (own, group) in enumerate(zip(own_groups, groups, strict=True))
        for key, expected in wrong_arguments(own, group)
    ]
    if problems:
        return problems
    known = {number: name for name, number in optimizer.numbers.items()}
    kept = [kept_of(optimizer.optimizer, {**own, **group}) for own, group in zip(own_groups, groups, strict=True)]
    kept_by = {number: kept[place] for place, own in enumerate(own_groups) for number in own[MEMBERS]}
    for number, states in given[STATE].items():
        if number not in known:
            problems.append(
                _wrong(f"state, {number!r}", f"numbers of parameters, {min(known)} to {max(known)}", repr(number))
            )
        elif not isinstance(states, Mapping):
            problems.append(_wrong(f"state, {known[number]}", "what the optimizer keeps, by name", shown(states)))
        else:
            name = known[number]
            problems += _wrong_states(name, _states_of(given, number), optimizer.shapes[name], kept_by[number])
    return problems[:_SHOWN]


def _states_of(given: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the states of a parameter, without the None that torch has for absent ones."""
    return {key: value for key, value in given[STATE].get(number, {}).items() if value is not None}


def wrong_arguments(own: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a saved group that do not fit the optimizer's own group, and what was expected."""
    for key, value in own.items():
        if key == MEMBERS:
            continue
        if isinstance(value, tuple | list):
            each = given.get(key)
            if not isinstance(each, tuple | list) or len(each) != len(value) or not all(map(_is_positive, each)):
                yield key, f"{len(value)} numbers of 0 or more"
        elif is_number(value) and not _is_positive(given.get(key)):
            yield key, "a finite number of 0 or more"
    for key, value in given.items():
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        try:
            json.dumps(plain)
        except (TypeError, ValueError):
            yield key, "a number, a word, or several"


def _is_positive(value: object) -> bool:
    return is_number(value) and 0 <= float(value) < math.inf  # type: ignore[arg-type] - it is a number


def _wrong_states(
    name: str, states: Mapping[str, Any], shape: Sequence[int], kept: Mapping[str, bool] | None
) -> Iterator[LengthwiseError]:
    if kept is not None and states and states.keys() != kept.keys():
        expected = ", ".join(sorted(kept)) or "nothing, as this optimizer keeps nothing"
        yield _wrong(f"state, {name}", expected, ", ".join(sorted(map(str, states))))
        return
    for key, value in states.items():
        by_entry = isinstance(value, Tensor) and value.dim() > 0 if kept is None else kept[key]
        where = f"state, {name}, {key}"
        if not by_entry:
            if expected := wrong_number(key, value):
                yield _wrong(where, expected, shown(value))
        else:
            yield from _wrong_tensor(where, value, shape, least=0.0 if key in NOT_NEGATIVE else -math.inf)


def wrong_number(key: str, value: object) -> str | None:
    """Return what was expected of a number in an optimizer's state, or None if the number is possible."""
    number = float(value) if is_number(value) else math.nan  # type: ignore[arg-type] - it is a number
    if math.isfinite(number) and (key != "step" or (number >= 0 and number.is_integer())):
        return None
    return "a whole number of 0 or more" if key == "step" else "a finite number"


def _wrong_tensor(
    where: str, value: object, shape: Sequence[int], least: float = -math.inf
) -> Iterator[LengthwiseError]:
    """Check that a value is a tensor of a shape, with finite floating-point numbers from `least` on."""
    is_floating = isinstance(value, Tensor) and value.is_floating_point() and value.layout == torch.strided
    if not isinstance(value, Tensor) or not is_floating or value.is_meta:
        got = shown(value) + " on the meta device" * (isinstance(value, Tensor) and value.is_meta)
        yield _wrong(where, f"a floating-point tensor {tuple(shape)}", got)
    elif tuple(value.shape) != tuple(shape):
        yield _wrong(where, f"{tuple(shape)}, {math.prod(shape)} entries", f"{tuple(value.shape)}")
    elif value.numel() and not (value.isfinite().all() and value.min() >= least):
        expected = "finite numbers" + (" of 0 or more" if least == 0 else "")
        yield _wrong(where, expected, f"numbers from {value.min():g} to {value.max():g}")


def _problems_of_weights(
    weights: Mapping[str, Any] | None, wanted: Mapping[str, Sequence[int]]
) -> list[LengthwiseError]:
    problems: list[LengthwiseError] = []
    if weights is None:
        return []
    for name in sorted(wanted.keys() | weights.keys()):
        where = f"state, master_weights, {name}"
        if name not in wanted:
            problems.append(_wrong(where, "no such parameter", shown(weights[name])))
        elif name not in weights:
            problems.append(_wrong(where, str(tuple(wanted[name])), "nothing"))
        else:
            problems += _wrong_tensor(where, weights[name], wanted[name])
    return problems[:_SHOWN]


def _wrong(where: str, expected: str, got: str) -> ConfigError:
    return ConfigError(where, expected=expected, got=got, remedy=_REMEDY)
