"""torch's optimizer on this rank's slices of the master weights, whether a run file names it or a loop has made it.

An optimizer that computes each entry by itself gives the same on a slice as on the whole parameter, so how parameters
are cut changes no result. Its groups, arguments and states stay its own; in its groups are slices, one of each
parameter, empty where this rank has none of it.

Offloaded, master weights and states are in the host's memory, and the update runs there: the rank's sum of gradients is
copied there once a step, and `Parameters.publish` brings the new values back.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lengthwise.comm import Transport
from lengthwise.config import OptimizerConfig
from lengthwise.engine.flat_layout import Run
from lengthwise.engine.lion import Lion
from lengthwise.engine.norm import clip_factor, norm_bytes, reduce_gradients
from lengthwise.engine.parameters import Parameters

_KINDS: Mapping[str, Callable[..., Any]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "lion": Lion,
}
FUSED = ("adamw", "adam", "sgd")  # of which torch has one kernel for a whole update, on the CPU as on GPUs
_TEMPORARIES: Mapping[type[Optimizer], int] = {
    torch.optim.AdamW: 2
}  # of a slice's size in an update by one slice after the other
_MOST_TEMPORARIES = 6
_STATES = 2  # an entry, of most optimizers; amsgrad and centered keep one more
_MEMBERS = "params"


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeOptimizer:
    """An optimizer of whole parameters, as it was before these were cut.

    given: the parameters that train, by name in the whole model. group_of: the number of each one's group. numbers:
    which of the optimizer's parameters, as torch counts them, each is. members: the numbers of each group. frozen: by
    number, parameters in its groups that do not train. states: what it has kept of each so far, until slices take it.
    """

    optimizer: Optimizer
    given: Mapping[str, nn.Parameter]
    group_of: Mapping[str, int]
    numbers: Mapping[str, int]
    members: Sequence[Sequence[int]]
    frozen: Mapping[int, nn.Parameter]
    states: dict[str, Mapping[str, Any]]


def read_optimizer(optimizer: Optimizer, model: nn.Module) -> WholeOptimizer:
    """Return what there is of an optimizer of a model's parameters."""
    groups = [group[_MEMBERS] for group in optimizer.param_groups]
    group_of = {id(each): number for number, group in enumerate(groups) for each in group}
    every = [each for group in groups for each in group]
    counted = {id(each): number for number, each in enumerate(every)}
    given = {name: each for name, each in model.named_parameters() if each.requires_grad}
    learning = {id(each) for each in given.values()}  # towers may be in groups, and have no gradients
    return WholeOptimizer(
        optimizer=optimizer,
        given=given,
        group_of={name: group_of[id(each)] for name, each in given.items()},
        numbers={name: counted[id(each)] for name, each in given.items()},
        members=[[counted[id(each)] for each in group] for group in groups],
        frozen={number: each for number, each in enumerate(every) if id(each) not in learning},
        states={name: optimizer.state.get(each, {}) for name, each in given.items()},
    )


def optimizer_of(config: OptimizerConfig, model: nn.Module, *, fused: bool | None = None) -> WholeOptimizer:
    """Return the optimizer of a run file: weight decay is for parameters of two or more dimensions.

    fused: None: where `FUSED` has it.
    """
    options: dict[str, Any] = {"fused": config.name in FUSED if fused is None else fused}
    if config.name == "lion":
        options = {}
    elif not options["fused"]:
        options["foreach"] = False  # which would need as much as all slices
    # Of a tensor that has a device, as the parameters may have none yet.
    made = _KINDS[config.name]([torch.zeros(1)], lr=config.lr or 0.0, **config.arguments, **options)
    made.param_groups.clear()
    trained = [each for each in model.parameters() if each.requires_grad]
    for decays in (True, False):
        members = [each for each in trained if (each.dim() >= 2) == decays]
        made.add_param_group({_MEMBERS: members, "weight_decay": config.weight_decay if decays else 0.0})
    return read_optimizer(made, model)


def sliced_optimizer(
    config: OptimizerConfig, model: nn.Module, parameters: Parameters, rank: int, *, fused: bool | None = None
) -> SlicedOptimizer:
    """Return the optimizer of a run file on slices, all its states made: what does not fit shows before a step.

    fused: as for `optimizer_of`.
    """
    whole = optimizer_of(config, model, fused=fused)
    optimizer = SlicedOptimizer(whole, parameters, rank, offloads=config.offload)
    optimizer.make_states()
    return optimizer


class SlicedOptimizer:
    """An optimizer whose groups hold this rank's slices of the model's parameters, with what it kept of them so far.

    optimizer: torch's. numbers: as of `WholeOptimizer`. shapes: of the whole parameters. rank: of this one among those
    over which `parameters` lie. offloads: slices and states are on the host.
    """

    def __init__(self, whole: WholeOptimizer, parameters: Parameters, rank: int, *, offloads: bool = False) -> None:
        self.optimizer, self.parameters, self.rank, self.offloads = whole.optimizer, parameters, rank, offloads
        self.numbers, self._group_of, self._members = whole.numbers, whole.group_of, whole.members
        self.shapes = {name: tuple(each.shape) for name, each in whole.given.items()}
        self._gradients = summed = parameters.grad_shard
        if offloads:
            assert parameters.master_weights.device.type == "cpu", parameters.master_weights.device
            self._gradients = torch.zeros(summed.shape, dtype=summed.dtype, pin_memory=summed.is_cuda)
        self._is_behind = False  # the gradients on the host, of those on the device
        self._is_new = False  # of states: all are zeros
        runs = {parameters.names[run.parameter]: run for run in parameters.layout.runs(rank)}
        nothing = Run(parameter=-1, entry=0, start=0, stop=0)
        self._runs = {name: runs.get(name, nothing) for name in self.numbers}
        self._pieces = {
            name: nn.Parameter(parameters.master_weights[run.start : run.stop]) for name, run in self._runs.items()
        }
        self.optimizer.state.clear()
        self._put_into_groups(self._pieces)
        for name, run in self._runs.items():
            if state := whole.states.pop(name):
                own = {key: _sliced(value, self.shapes[name], run) for key, value in state.items()}
                self.optimizer.state[self._pieces[name]] = {
                    key: value.to("cpu") if offloads and isinstance(value, Tensor) else value
                    for key, value in own.items()
                }
        whole.states.clear()

    def _put_into_groups(self, members: Mapping[str, nn.Parameter]) -> None:
        """Put slices by name into the groups: in new lists, which a loop may change."""
        lists = [list[nn.Parameter]() for _ in self.optimizer.param_groups]
        for name, each in members.items():
            lists[self._group_of[name]].append(each)
        for group, own in zip(self.optimizer.param_groups, lists, strict=True):
            group[_MEMBERS] = own

    # A step: gradients, their scale, the update.

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add what backwards make inside to what there is.

        A backward that fails clears all gradients: what it has left of a sum is no gradient of any loss.
        """
        self.parameters.keep_sum()
        self.parameters.attach_gradients()
        try:
            yield
        except BaseException:
            self.parameters.detach_gradients()
            self.zero_grad()
            raise
        self.parameters.detach_gradients()
        self.parameters.free()
        self._is_behind = self.offloads

    def scale_gradients(self, factor: float) -> None:
        """Multiply the sum of the gradients."""
        self.parameters.grad_shard.mul_(factor)
        self._is_behind = self.offloads

    def zero_grad(self) -> None:
        """Clear all gradients of this rank: those of the slices, and those from which the slices are summed."""
        self.parameters.clear_gradients()
        if self.offloads:
            self._gradients.zero_()
        self._is_behind = False

    def _bring_gradients(self) -> None:
        """Have the sum of the gradients where slices are updated."""
        if self._is_behind:
            self._gradients.copy_(self.parameters.grad_shard)  # which waits for it
            self._is_behind = False

    def _give_gradients(self, names: Collection[str]) -> None:
        """Give the slices of these names their gradients, and the others none."""
        self._bring_gradients()
        for name, piece in self._pieces.items():
            run = self._runs[name]
            piece.grad = self._gradients[run.start : run.stop] if name in names else None

    def update(self, lr: float) -> None:
        """Update this rank's slices by all gradients."""
        self._is_behind, self._is_new = self.offloads, False
        self._give_gradients(self.numbers)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def step(self, lr: float) -> None:
        """Update this rank's slices, publish them, and clear the gradients. Collective."""
        self.update(lr)
        self.parameters.publish()
        self.zero_grad()

    def end_step(self, lr: float, transport: Transport, *, limit: float | None = 1.0) -> float:
        """Reduce, clip to a norm of `limit`, and step, outside of any loop; return the norm before. Collective."""
        norm = reduce_gradients(self.parameters, transport)
        if limit is not None:
            self.scale_gradients(clip_factor(limit, norm))
        self.step(lr)
        return norm

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Let updates inside the block change nothing, to the bit, of gradients and lr 0.

        After the first step this takes a copy of the states in the host's memory.
        """
        is_new = self._is_new
        kept = [(each, None if is_new else each.to("cpu", copy=True)) for each in self._kept_tensors()]
        yield
        for each, before in kept:
            each.zero_() if before is None else each.copy_(before)
        self._is_new = is_new

    def pending_bytes(self) -> tuple[int, int]:
        """Count the bytes of states that are yet to be made, and those that a step's end needs for a while."""
        summed, published = self.parameters.grad_shard, self.parameters.publish_bytes()
        if self.offloads and summed.is_cuda:
            return 0, max(norm_bytes(summed), published)
        states = 0 if self.optimizer.state else states_an_entry(self.optimizer)
        return states * summed.nbytes, max(norm_bytes(summed), self._update_bytes(), published)

    def _update_bytes(self) -> int:
        groups = self.optimizer.param_groups
        if self.offloads or all(group.get("fused") for group in groups):
            return 0
        if any(group.get("foreach", True) is not False for group in groups):
            return 2 * self.parameters.grad_shard.nbytes
        temporaries = _TEMPORARIES.get(type(self.optimizer), _MOST_TEMPORARIES)
        return temporaries * max((each.nbytes for each in self._pieces.values()), default=0)

    # What the optimizer keeps.

    def _key(self, name: str) -> Tensor:
        """Return by what the optimizer's states have that of a parameter, between steps."""
        return self._pieces[name]

    def _keep(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Let the optimizer keep this of its slice of a parameter, where it computes with it."""
        group, piece = self.optimizer.param_groups[self._group_of[name]], self._pieces[name]
        counts_on = piece.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
        self.optimizer.state[self._key(name)] = {
            key: value.to(piece.device if value.dim() else counts_on) for key, value in state.items()
        }
        self._is_new = False

    def make_states(self) -> None:
        """Make all states, of an optimizer whose states begin with zeros: what does not fit shows before a step."""
        kept = [kept_of(self.optimizer, group) for group in self.optimizer.param_groups]
        assert all(each is not None for each in kept), type(self.optimizer)
        exact = self.parameters.master_weights
        vectors = sorted({key for each in kept for key, by_entry in (each or {}).items() if by_entry})
        flat = {key: torch.empty_like(exact).zero_() for key in vectors}  # takes the memory
        for name, run in self._runs.items():
            made = {
                key: flat[key][run.start : run.stop] if by_entry else torch.zeros((), dtype=torch.float32)
                for key, by_entry in (kept[self._group_of[name]] or {}).items()
            }
            self._keep(name, made)
        self._is_new = True

    def _kept_tensors(self) -> list[Tensor]:
        return [each for state in self.optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]

    def states(self) -> Iterator[tuple[Run, dict[str, Any]]]:
        """Yield what the optimizer keeps of each slice that is not empty."""
        for name, run in self._runs.items():
            if run.start < run.stop:
                yield run, self.optimizer.state.get(self._key(name), {})

    def set_states(self, parameter: int, states: Mapping[str, Tensor]) -> None:
        """Replace what is kept of a parameter by this rank's slices of `states`, (entries,) or () each."""
        name = self.parameters.names[parameter]
        entries = _entries(self._runs[name])
        self._keep(name, {key: (each[entries] if each.dim() else each).clone() for key, each in states.items()})

    def vectors(self) -> dict[str, Tensor]:
        """Return a copy of what is kept of each entry, by name: (entries,) of this rank's shard, on the host."""
        found, exact = dict[str, Tensor](), self.parameters.master_weights
        for run, state in self.states():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    whole = found.setdefault(key, torch.zeros(exact.shape, dtype=exact.dtype))
                    whole[run.start : run.stop].copy_(value)
        return found

    def take_vectors(self, vectors: Mapping[str, Tensor], *, updates: int) -> None:
        """Take what `vectors` returned, in the states that there are, after so many updates."""
        for run, state in self.states():
            for key, value in vectors.items():
                state[key].copy_(value[run.start : run.stop])
            if "step" in state:
                state["step"].fill_(updates)
        self._is_new = not updates

    def plain_groups(self) -> list[dict[str, Any]]:
        """Return the groups as torch's `state_dict` does, with the numbers of the whole parameters."""
        groups = ({k: v for k, v in group.items() if k != _MEMBERS} for group in self.optimizer.param_groups)
        return [{**group, _MEMBERS: list(each)} for group, each in zip(groups, self._members, strict=True)]

    def arguments(self) -> list[dict[str, Any]]:
        """Return the arguments of the groups, such as learning rates, as numbers."""
        groups = self.optimizer.param_groups
        return [{key: plain_value(value) for key, value in group.items() if key != _MEMBERS} for group in groups]

    def set_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set the arguments of the groups."""
        for group, given in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})


def states_an_entry(optimizer: Optimizer) -> int:
    """Count what an optimizer keeps of each entry: two by most, and what arguments ask for beside."""
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.SGD):
        return int(any(group.get("momentum") for group in groups))
    return _STATES + any(group.get("amsgrad") or group.get("centered") for group in groups)


def kept_of(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, bool] | None:
    """Return what an optimizer keeps of a parameter by these arguments, and whether for each entry; None: unknown."""
    probe, parameter = copy.copy(optimizer), nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    plain = {key: value for key, value in group.items() if key not in ("fused", "capturable", "foreach")}
    probe.param_groups = [{**plain, "fused": False, "capturable": False, "foreach": False, _MEMBERS: [parameter]}]
    probe.state = defaultdict(dict)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(probe, name, OrderedDict())
    try:
        with torch.enable_grad():
            type(optimizer).step(probe)
    except Exception:  # noqa: BLE001 - an optimizer of the loop's, which may need more
        return None
    found = probe.state[parameter].items()
    return {key: isinstance(each, Tensor) and each.dim() > 0 for key, each in found if each is not None}


def plain_value(value: Any) -> Any:
    """Return an argument of a group as a number; a learning rate may be a tensor."""
    return value.tolist() if isinstance(value, Tensor) else value


def _entries(run: Run) -> slice:
    """Return which entries of a parameter a run has."""
    return slice(run.entry, run.entry + run.stop - run.start)


def _sliced(value: Any, shape: tuple[int, ...], run: Run) -> Any:
    """Return the run's slice of what is kept of each entry of a parameter, and a copy of any other tensor."""
    if not isinstance(value, Tensor):
        return value
    return value.reshape(-1)[_entries(run)].clone() if tuple(value.shape) == shape else value.clone()
