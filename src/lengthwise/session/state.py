"""What a session saves and takes back: whole tensors by parameter, in the form of the loop's own optimizer.

So a state fits any number of ranks, and a plain loop: its optimizer loads it, and a session loads that of a plain loop.
Tensors pass one bucket or parameter at a time, and rank 0 alone keeps them, in the host's memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lengthwise.comm import Transport, broadcast_bytes
from lengthwise.core.errors import ConfigError, raise_problems
from lengthwise.engine.gathering import gather_to_first, set_master_weights
from lengthwise.engine.parameters import Parameters
from lengthwise.session.sharded import ShardedInPlace, plain_value
from lengthwise.session.state_checks import (
    GROUPS,
    MEMBERS,
    STATE,
    problems_of_form,
    problems_of_optimizer,
    problems_of_weights,
    states_of,
)


def whole_state(optimizer: ShardedInPlace, transport: Transport) -> dict[str, Any]:
    """Return what torch's `Optimizer.state_dict` would of the whole parameters, on rank 0; {} on others. Collective."""
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


def take_state(
    optimizer: ShardedInPlace,
    transport: Transport,
    state: Mapping[str, Any] | None,
    names_inside: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> int:
    """Give each rank its slices of what rank 0 was given: a whole optimizer's state dict, and weights by name.

    Without weights those that there are stay. names_inside: of the model in its wrap. transport: of all ranks,
    which may be stages. Collective.

    Raises:
        ConfigError, Problems: it is of other parameters or groups; nothing was changed.

    Returns:
        The steps that were made.
    """
    parameters, rank = optimizer.parameters, optimizer.rank
    places = {name: place for place, name in enumerate(parameters.names)}
    sent: dict[str, Any] = {"problems": []}
    given = weights = None
    if not transport.rank:
        problems = problems_of_form(state)
        if state is not None and not problems:
            given, weights = state["optimizer"], state.get("master_weights")
            weights = None if weights is None else names_inside(weights)
            problems = [*problems_of_optimizer(given, optimizer), *problems_of_weights(weights, optimizer.shapes)]
        sent["problems"] = [(problem.where, problem.expected, problem.got, problem.remedy) for problem in problems]
        if given is not None and not problems:
            groups = [{k: v for k, v in group.items() if k != MEMBERS} for group in given[GROUPS]]
            kinds = {number: sorted(states_of(given, number)) for number in optimizer.numbers.values()}
            sent |= {
                "steps": int((state or {}).get("steps", 0)),
                "groups": [{k: plain_value(v) for k, v in group.items()} for group in groups],
                "keys": kinds,
                "weights": weights is not None,
            }
    sent = json.loads(broadcast_bytes(transport, json.dumps(sent).encode()))
    raise_problems([ConfigError(where, expected=a, got=b, remedy=c) for where, a, b, c in sent["problems"]])
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
                set_master_weights(parameters, rank, place, whole)
    return sent["steps"]


def _kinds(optimizer: ShardedInPlace, transport: Transport) -> tuple[list[str], list[str]]:
    """Return what states of all ranks are named that have one number an entry, and the others."""
    vectors, numbers = set[str](), set[str]()
    for run, state in optimizer.states():
        for key, value in state.items():
            by_entry = isinstance(value, Tensor) and value.dim() > 0 and len(value) == run.stop - run.start
            if value is not None:
                (vectors if by_entry else numbers).add(key)
    numbers -= vectors
    own = json.dumps([sorted(vectors), sorted(numbers)]).encode()
    for source in range(transport.world_size):  # each may have states of parameters that others have none of
        found = json.loads(broadcast_bytes(transport, own if source == transport.rank else None, source=source))
        vectors, numbers = vectors | set(found[0]), numbers | set(found[1])
    return sorted(vectors), sorted(numbers - vectors)


def _sent(value: Tensor | None, entries: int, parameters: Parameters, transport: Transport) -> Tensor:
    """Return on every rank what rank 0 has: flat, one number an entry of a parameter, or a number alone."""
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
