"""A state in one file for a plain loop: made of a folder of slices without ranks, and read by every rank for itself.

It is torch's `Optimizer.state_dict` of whole parameters. An exported file also has `steps` and `master_weights` (exact
weights by name), which an optimizer's `load_state_dict` ignores; a plain loop's `optimizer.pt` has neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lengthwise.checkpoint.manifest import Manifest, OptimizerState, read_manifest
from lengthwise.checkpoint.part import broken, read_state, unfit, wrong_numbers
from lengthwise.core.errors import LengthwiseError, OutputError, raise_problems
from lengthwise.core.files import unfinished_of
from lengthwise.engine.flat_layout import lay_out
from lengthwise.engine.optimizer import SlicedOptimizer, plain_value
from lengthwise.engine.parameters import MASTER_WEIGHTS
from lengthwise.engine.whole_optimizer import MEMBERS

_STATE, _GROUPS, _STEPS = "state", "param_groups", "steps"
_SHOWN = 8  # problems

Tensors = Mapping[str, Mapping[str, Tensor]]
"""States with one value an entry, or exact weights, whole: by the name of the state, then of the parameter."""


def export_state(folder: Path, out: Path) -> None:
    """Write the state of a checkpoint's folder into the new file `out`; the host must hold all of it.

    Raises:
        OutputError: the folder is damaged or no checkpoint, or `out` exists or cannot be written.
    """
    manifest = read_manifest(folder)
    if out.exists():
        raise OutputError(str(out), expected="a new file", got="an existing one", remedy="Choose another {to}.")
    state, dtype = manifest.optimizer, getattr(torch, manifest.dtype)
    keys = [MASTER_WEIGHTS] if state is None else [MASTER_WEIGHTS, *state.vectors]
    found = broken(folder, manifest) or unfit(folder, manifest, {key: torch.empty(0, dtype=dtype) for key in keys})
    if state is None or found is not None:
        expected, got = "undamaged files with an optimizer's groups", found or "those of an earlier version"
        raise OutputError(str(folder), expected=expected, got=got, remedy="Take another checkpoint.")
    whole = _state_dict(state, {key: _whole(folder, manifest, key, dtype) for key in keys})
    unfinished = unfinished_of(out)
    try:
        torch.save({**whole, _STEPS: manifest.step}, unfinished)
        unfinished.replace(out)
    except (OSError, RuntimeError) as error:
        unfinished.unlink(missing_ok=True)
        remedy = "Free or repair the disk, or choose another {to}."
        raise OutputError(str(out), expected="a file that can be written", got=str(error), remedy=remedy) from None


def _whole(folder: Path, manifest: Manifest, key: str, dtype: torch.dtype) -> dict[str, Tensor]:
    names, found = [each.name for each in manifest.parameters], manifest.parameters
    layout = lay_out([each.entries for each in found], [0] * len(found), world_size=1)
    flat = torch.empty(layout.entries, dtype=dtype)
    read_state(folder, manifest, layout, names, 0, {key: flat})
    starts = zip(found, layout.starts, strict=True)
    return {each.name: flat[start : start + each.entries].view(each.shape) for each, start in starts}


def _state_dict(state: OptimizerState, tensors: Tensors) -> dict[str, Any]:
    """Return torch's `state_dict`, with the numbers of parameters by torch's count, and the exact weights."""
    counted, groups, numbers = count(), list[dict[str, Any]](), dict[str, int]()
    for group in state.groups:
        members = [next(counted) for _ in group[MEMBERS]]
        numbers |= dict(zip(group[MEMBERS], members, strict=True))
        arguments = {key: tuple(each) if isinstance(each, list) else each for key, each in group.items()}
        groups.append({**arguments, MEMBERS: members})
    states = {
        numbers[name]: {k: tensors[k][name] if number is None else torch.tensor(number) for k, number in kept.items()}
        for name, kept in sorted(state.states.items(), key=lambda each: numbers[each[0]])
    }
    return {_STATE: states, _GROUPS: groups, MASTER_WEIGHTS: tensors[MASTER_WEIGHTS]}


def read_whole(
    path: Path, optimizer: SlicedOptimizer, check: Callable[[OptimizerState], None]
) -> tuple[int | None, OptimizerState, dict[str, Tensor]]:
    """Read this rank's slices of the states in a file, and of weights if it has them.

    check: raises if groups and states are not those of `optimizer`.

    Raises:
        OutputError, Problems: the file has no such state, or tensors of other shapes or with impossible values.

    Returns:
        The steps, if the file has them; the optimizer's state without tensors; and tensors (entries,) by state.
    """

    def wrong(where: str, expected: str, got: str) -> OutputError:
        remedy = "Name a file that torch.save wrote of optimizer.state_dict(), of this model and optimizer."
        return OutputError(f"{path}{where}", expected=expected, got=got, remedy=remedy)

    try:
        given = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        steps = int(given[_STEPS]) if _STEPS in given else None
        state, tensors = _of_state_dict(given, optimizer)
        check(state)
        raise_problems([wrong(*each) for each in islice(_wrong_shapes(tensors, optimizer), _SHOWN)])
        shards = {key: _shard_of(whole, optimizer) for key, whole in tensors.items()}
    except LengthwiseError:
        raise
    except Exception as error:  # noqa: BLE001 - of a disk, of torch, or of a form not thought of
        raise wrong("", "the state of a plain optimizer", f"{type(error).__name__}: {error}") from None
    for key, shard in shards.items():
        if got := wrong_numbers(key, shard):
            raise wrong(f", {key}", "values that training can continue from", f"a tensor {got}")
    return steps, state, shards


def _of_state_dict(given: Mapping[str, Any], optimizer: SlicedOptimizer) -> tuple[OptimizerState, Tensors]:
    """Undo `_state_dict`, by the numbers that the optimizer's parameters have; weights may be missing."""
    names: dict[int, str | None] = {number: None for each in optimizer.plain_groups() for number in each[MEMBERS]}
    names |= {number: name for name, number in optimizer.numbers.items()}
    groups = [{key: plain_value(each) for key, each in group.items()} for group in given[_GROUPS]]
    for group in groups:
        group[MEMBERS] = [names.get(number, f"parameter {number}") for number in group[MEMBERS]]
    states, tensors = defaultdict[str, dict[str, float | None]](dict), defaultdict[str, dict[str, Tensor]](dict)
    for number, kept in given[_STATE].items():
        name = names.get(number) or f"parameter {number}, which does not train"
        is_single = optimizer.shapes.get(name) == ()
        for key, value in kept.items():
            if isinstance(value, Tensor) and (value.dim() > 0 or (is_single and key != "step")):
                states[name][key], tensors[key][name] = None, value
            elif value is not None:  # as torch has absent states
                states[name][key] = float(value)
    if MASTER_WEIGHTS in given:
        tensors[MASTER_WEIGHTS] = dict(given[MASTER_WEIGHTS])
    kind = type(optimizer.optimizer).__name__
    return OptimizerState(kind=kind, groups=tuple(groups), states=dict(states)), tensors


def _wrong_shapes(tensors: Tensors, optimizer: SlicedOptimizer) -> Iterator[tuple[str, str, str]]:
    """Yield (where, expected, got) for tensors that do not fit their parameters, or would lose bits."""
    exact = optimizer.parameters.master_weights.dtype
    for key, whole in tensors.items():
        missing = optimizer.shapes.keys() - whole.keys() if key == MASTER_WEIGHTS else ()
        for name, value in (dict.fromkeys(missing) | dict(whole)).items():
            shape = optimizer.shapes.get(name, "nothing")
            got = "nothing" if value is None else f"{tuple(value.shape)} in {value.dtype}"
            is_wider = value is not None and torch.promote_types(value.dtype, exact) != exact
            if value is None or tuple(value.shape) != shape or not value.is_floating_point() or is_wider:
                yield f", {key} of {name}", f"{shape} in {exact} or a narrower dtype", got


def _shard_of(whole: Mapping[str, Tensor], optimizer: SlicedOptimizer) -> Tensor:
    """Return this rank's slices of whole tensors by parameter, (entries,) on the host; 0 for missing ones."""
    parameters = optimizer.parameters
    shard = torch.zeros_like(parameters.master_weights, device="cpu")
    for run, _ in optimizer.states():
        values = whole.get(parameters.names[run.parameter])
        if values is not None:
            shard[run.start : run.stop] = values.reshape(-1)[run.entry : run.entry + run.stop - run.start]
    return shard
