"""torch's optimizer on this rank's slices of the master weights, named by a run file or made by a loop.

An optimizer that computes each entry by itself gives the same on a slice as on the whole parameter, so the layout
changes no result. It keeps its own groups, arguments and states; its groups hold one slice of every parameter, empty if
this rank has no part of it.

With offloading, master weights and states are in host memory, and the update runs there: the rank's sum of gradients is
copied there once a step, and `Parameters.publish` brings the new values back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lengthwise.comm import Transport
from lengthwise.config import OptimizerConfig
from lengthwise.engine.flat_layout import Run
from lengthwise.engine.norm import clip_factor, norm_bytes, reduce_gradients
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.whole_optimizer import MEMBERS, WholeOptimizer, kept_of, optimizer_of, states_an_entry

_TEMPORARIES: Mapping[type[Optimizer], int] = {torch.optim.AdamW: 2}  # temporaries of a slice's size in an update
_MOST_TEMPORARIES = 6


def sliced_optimizer(
    config: OptimizerConfig, model: nn.Module, parameters: Parameters, rank: int, *, fused: bool | None = None
) -> SlicedOptimizer:
    """Return the optimizer of a run file on slices, with all its states, so that a memory shortage shows before a step.

    fused: True for torch's fused kernels, by default for `FUSED` ones.
    """
    return made_on_slices(optimizer_of(config, model, fused=fused), parameters, rank, offloads=config.offload)


def made_on_slices(whole: WholeOptimizer, parameters: Parameters, rank: int, *, offloads: bool) -> SlicedOptimizer:
    """Return an optimizer on slices with all its states. whole: a section's optimizer of the unlaid parameters."""
    optimizer = SlicedOptimizer(whole, parameters, rank, offloads=offloads)
    optimizer.make_states()
    return optimizer


class SlicedOptimizer:
    """An optimizer whose groups hold this rank's slices of the model's parameters, with their states so far.

    optimizer: torch's optimizer. numbers: numbers of the trainable parameters by torch's count. shapes: shapes of the
    whole parameters. rank: this rank's number among those that share `parameters`. offloads: True if slices and states
    are on the host.
    """

    def __init__(self, whole: WholeOptimizer, parameters: Parameters, rank: int, *, offloads: bool = False) -> None:
        self.optimizer, self.parameters, self.rank, self.offloads = whole.optimizer, parameters, rank, offloads
        self.numbers, self._group_of, self._members = whole.numbers, whole.group_of, whole.members
        self.shapes = {name: tuple(each.shape) for name, each in whole.given.items()}
        self._gradients = summed = parameters.grad_shard
        if offloads:
            assert parameters.master_weights.device.type == "cpu", parameters.master_weights.device
            self._gradients = torch.zeros(summed.shape, dtype=summed.dtype, pin_memory=summed.is_cuda)
        self._is_behind = False  # whether gradients on the host are older than those on the device
        self._is_new = False  # whether all states are zeros
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
                self.optimizer.state[self._pieces[name]] = self._placed(name, own)
        whole.states.clear()

    @property
    def has_edited_weights(self) -> bool:
        """Whether a loop has changed slices that are not published yet, see `session.loop_optimizer`."""
        return False

    def _put_into_groups(self, members: Mapping[str, nn.Parameter]) -> None:
        """Put slices by name into the groups, in new lists."""
        lists = [list[nn.Parameter]() for _ in self.optimizer.param_groups]
        for name, each in members.items():
            lists[self._group_of[name]].append(each)
        for group, own in zip(self.optimizer.param_groups, lists, strict=True):
            group[MEMBERS] = own

    # A step: gradients, their scale, the update.

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add the gradients of backwards inside the block to the sum.

        A failed backward clears all gradients, because a partial sum is no loss's gradient.
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
        """Multiply the sum of the gradients by a factor."""
        if factor != 1.0:  # most steps are not clipped
            self.parameters.grad_shard.mul_(factor)
            self._is_behind = self.offloads

    def zero_grad(self) -> None:
        """Clear all gradients of this rank: of the slices, and of the parameters they are summed from."""
        self.parameters.clear_gradients()
        if self.offloads:
            self._gradients.zero_()
        self._is_behind = False

    def _bring_gradients(self) -> None:
        if self._is_behind:
            self._gradients.copy_(self.parameters.grad_shard)  # waits for the device
            self._is_behind = False

    def _give_gradients(self, names: Collection[str]) -> None:
        """Set the gradients of these slices, and clear the others'."""
        self._bring_gradients()
        for name, piece in self._pieces.items():
            run = self._runs[name]
            piece.grad = self._gradients[run.start : run.stop] if name in names else None

    def update(self, lr: float, without: Collection[str] = ()) -> None:
        """Update this rank's slices. without: names of parameters without a gradient, which stay as they are."""
        self._is_behind, self._is_new = self.offloads, False
        self._give_gradients(self.numbers.keys() - without)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def step(self, lr: float, without: Collection[str] = ()) -> None:
        """Update this rank's slices, publish them, and clear the gradients. Collective. without: as in `update`."""
        self.update(lr, without)
        self.parameters.publish()
        self.zero_grad()

    def take_changes(self) -> None:
        """Copy values that a loop wrote into whole parameters since the last step to the slices."""
        self.parameters.take_changes()

    def publish(self) -> None:
        """Send the weights of the slices to all ranks, and wait for them. Collective."""
        self.parameters.publish()
        self.parameters.published()

    def end_step(self, lr: float, transport: Transport, *, limit: float | None = 1.0) -> float:
        """Reduce gradients, clip them to a norm of `limit`, and step; return the norm before. Collective."""
        norm = reduce_gradients(self.parameters, transport)
        if limit is not None:
            self.scale_gradients(clip_factor(limit, norm))
        self.step(lr)
        return norm

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Undo changes of states by updates inside the block, to the bit; with lr 0 nothing else changes.

        After the first step this takes a copy of the states in host memory.
        """
        is_new = self._is_new
        kept = [(each, None if is_new else each.to("cpu", copy=True)) for each in self._kept_tensors()]
        try:
            yield
        finally:
            for each, before in kept:
                each.zero_() if before is None else each.copy_(before)
            self._is_new = is_new

    def pending_bytes(self) -> tuple[int, int]:
        """Return the bytes of states that do not exist yet, and the temporary bytes of a step's end."""
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

    # The optimizer's states.

    def _key(self, name: str) -> Tensor:
        """Return the key of a parameter in the optimizer's states, between steps."""
        return self._pieces[name]

    def _keep(self, name: str, state: Mapping[str, Tensor]) -> None:
        self.optimizer.state[self._key(name)] = self._placed(name, state)
        self._is_new = False

    def _placed(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a slice's states on the device of the update, vectors in the slice's dtype.

        The whole parameter may have been on another device, and in a narrower dtype.
        """
        group, exact = self.optimizer.param_groups[self._group_of[name]], self.parameters.master_weights
        counts_on = exact.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
        tensors = {key: each for key, each in state.items() if isinstance(each, Tensor)}
        placed = {key: each.to(exact) if each.dim() else each.to(counts_on) for key, each in tensors.items()}
        return {**state, **placed}

    def make_states(self) -> None:
        """Make all states of an optimizer whose states begin with zeros, so that a shortage shows before a step."""
        kept = [kept_of(self.optimizer, group) for group in self.optimizer.param_groups]
        assert all(each is not None for each in kept), type(self.optimizer)
        exact = self.parameters.master_weights
        vectors = sorted({key for each in kept for key, by_entry in (each or {}).items() if by_entry})
        flat = {key: torch.empty_like(exact).zero_() for key in vectors}  # zero_ makes the host take the memory now
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
        """Yield the slices that are not empty, with their states."""
        for name, run in self._runs.items():
            if run.start < run.stop:
                yield run, self.optimizer.state.get(self._key(name), {})

    def set_slice(self, run: Run, states: Mapping[str, Tensor] | None) -> None:
        """Replace a slice's states by copies, (entries of the slice,) or () each, or remove them if None."""
        name = self.parameters.names[run.parameter]
        self.optimizer.state.pop(self._key(name), None)
        if states is not None:
            self._keep(name, {key: each.clone() for key, each in states.items()})

    def kept(self) -> dict[str, dict[str, float | None]]:
        """Return the states of parameters with entries on this rank: numbers, and None for vectors."""
        return {
            self.parameters.names[run.parameter]: {
                key: None if is_by_entry(value, run) else float(value)
                for key, value in state.items()
                if value is not None
            }
            for run, state in self.states()
            if state
        }

    def vectors(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Copy the states with one number per entry, (entries,) by name, to host memory; 0 for missing ones.

        names: by default all parameters of which this rank has entries.
        """
        exact = self.parameters.master_weights
        if names is None:
            names = sorted({key for kept in self.kept().values() for key, number in kept.items() if number is None})
        found = {name: torch.zeros(exact.shape, dtype=exact.dtype) for name in names}
        for run, state in self.states():
            for name in names:
                if name in state:
                    found[name][run.start : run.stop].copy_(state[name])
        return found

    def take_vectors(
        self, vectors: Mapping[str, Tensor], *, updates: int, kept: Mapping[str, Mapping[str, float | None]]
    ) -> None:
        """Copy the result of `vectors` into existing states, and set their numbers of updates.

        kept: states by name, as in `kept`. updates: number of updates of parameters that it lacks.
        """
        for run, state in self.states():
            for key, value in vectors.items():
                state[key].copy_(value[run.start : run.stop])
            if "step" in state:
                number = kept.get(self.parameters.names[run.parameter], {}).get("step")
                state["step"].fill_(updates if number is None else number)
        self._is_new = not updates

    def plain_groups(self) -> list[dict[str, Any]]:
        """Return the groups as torch's `state_dict` does, with the numbers of the whole parameters."""
        groups = ({k: v for k, v in group.items() if k != MEMBERS} for group in self.optimizer.param_groups)
        return [{**group, MEMBERS: list(each)} for group, each in zip(groups, self._members, strict=True)]

    def arguments(self) -> list[dict[str, Any]]:
        """Return the arguments of the groups, such as learning rates, as plain numbers."""
        groups = self.optimizer.param_groups
        return [{key: plain_value(value) for key, value in group.items() if key != MEMBERS} for group in groups]

    def set_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Set the arguments of the groups."""
        for group, given in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})


def is_by_entry(value: Any, run: Run) -> bool:
    """Return whether a slice's state has one value an entry."""
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == run.stop - run.start


def plain_value(value: Any) -> Any:
    """Convert an argument of a group from a tensor, as a learning rate may be, to a number."""
    return value.tolist() if isinstance(value, Tensor) else value


def _sliced(value: Any, shape: tuple[int, ...], run: Run) -> Any:
    """Return the run's slice of a state with one value per entry, or a copy of any other tensor."""
    if not isinstance(value, Tensor):
        return value
    entries = slice(run.entry, run.entry + run.stop - run.start)
    return value.reshape(-1)[entries].clone() if tuple(value.shape) == shape else value.clone()
