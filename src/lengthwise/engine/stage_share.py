"""Exchange between the stages of a pipeline about their parameters: the tied head, and what rank 0 saves of all stages.

A tied head belongs to the embedding, on the first stage, which alone updates it. The last stage has a copy: it sends
its gradient before the sum over the replicas, and takes the values after each update. So both are equal to the bit, the
norm counts the weight once, and it has one optimizer state. Costs two messages of the embedding's size a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.comm import Mesh, broadcast_bytes
from lengthwise.engine.flat_layout import FlatLayout, join_stages
from lengthwise.engine.units import Accumulation
from lengthwise.models import ModelStage


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedParameters:
    """The layout of all trained parameters in the `state` of all ranks, for checkpoints.

    rank: this rank's number in the layout of its own parameters.
    """

    layout: FlatLayout
    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    rank: int


class StageShare:
    """One stage's side of the exchange; without a stage (a whole model) nothing is exchanged.

    tied: the tied weight, on the stages with it or its copy. copy: the last stage's copy of it, if it trains. Make this
    before the parameters, and call `begin` after them.
    """

    def __init__(self, mesh: Mesh, stage: ModelStage | None = None, *, trains: bool = True) -> None:
        self.mesh, self._stage = mesh, stage
        self.tied: nn.Parameter | None = None if stage is None else stage.tied_weight()
        self.copy: nn.Parameter | None = None
        self._gradient: Tensor | None = None  # a trained tied weight's gradient, before the sum over the replicas
        self._trains = trains and self.tied is not None and self.tied.requires_grad
        if self.tied is not None and mesh.is_last:
            self.tied.requires_grad_(False)  # it is not updated here

    def begin(self, gradients: Mapping[int, Tensor], dtype: torch.dtype) -> list[Accumulation]:
        """Share the values of a tied weight; return where the gradients of a copy add up, in `dtype`. Collective.

        gradients: gradients of the parameters that train here, by their ids.
        """
        self.tied = tied = None if self._stage is None else self._stage.tied_weight()
        self.share_tied(from_first=True)
        if tied is None or not self._trains:
            return []
        if not self.mesh.is_last:
            self._gradient = gradients[id(tied)]
            return []
        self.copy = tied
        tied.requires_grad_(True)
        self._gradient = torch.zeros_like(tied, dtype=dtype)
        return [Accumulation([tied], [self._gradient])]

    def trained_dtypes(self) -> set[torch.dtype]:
        """Return the original dtypes of the trained parameters of all stages; none without stages."""
        stage = self._stage
        every = () if stage is None else zip(stage.trained, stage.entries, strict=True)
        return {entries[name][1] for trained, entries in every for name in trained}

    def saved(self, layout: FlatLayout, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> SavedParameters:
        """Join this stage's layout with those of the others. Collective."""
        rank = self.mesh.replicas.rank
        if self._stage is None:
            return SavedParameters(layout=layout, names=names, shapes=shapes, rank=rank)
        own, world = {"layout": asdict(layout), "names": names, "shapes": shapes}, self.mesh.world
        sent = [
            json.loads(broadcast_bytes(world, json.dumps(own).encode() if world.rank == stage else None, source=stage))
            for stage in range(self.mesh.stages)  # these ranks are the stages of replica 0
        ]
        return SavedParameters(
            layout=join_stages([_layout_of(one["layout"]) for one in sent]),
            names=[name for one in sent for name in one["names"]],
            shapes=[tuple(shape) for one in sent for shape in one["shapes"]],
            rank=rank,
        )

    def clear(self) -> None:
        """Clear the copy's gradient."""
        if self._gradient is not None and self.mesh.is_last:
            self._gradient.zero_()

    def add_tied_gradient(self) -> None:
        """Add the gradient of a tied head to the embedding's. Collective of the two stages."""
        gradient = self._gradient
        if gradient is not None and self.mesh.is_last:
            self._move(gradient, from_first=False)
            gradient.zero_()  # it was added there, and a session may run another backward before it updates
        elif gradient is not None:
            arriving = torch.empty_like(gradient)
            self._move(arriving, from_first=False)
            gradient.add_(arriving)

    def _move(self, tensor: Tensor, *, from_first: bool) -> None:
        mesh = self.mesh
        message = [(tensor, mesh.rank_of_stage(0 if mesh.is_last else mesh.stages - 1))]
        receives = mesh.is_last == from_first
        mesh.between.exchange([] if receives else message, message if receives else []).wait()

    def share_tied(self, *, from_first: bool) -> None:
        """Copy a tied weight from the first stage to the last, or back. Collective of the two."""
        if self.tied is not None:
            self._move(self.tied.data, from_first=from_first)  # .data: autograd counts no change

    @property
    def shares_updates(self) -> bool:
        """Whether this stage has a trained tied weight or its copy."""
        return self._gradient is not None

    def tied_norm(self) -> float:
        """Return the norm of a tied weight, equal to the bit on its two stages if their values are; 0.0 on others."""
        return 0.0 if self.tied is None else torch.linalg.vector_norm(self.tied.detach(), dtype=torch.float64).item()

    def gather_gradients(self, own: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return on rank 0 the gradients of all stages, by name; `own` on other ranks. Collective."""
        if self._stage is None:
            return own
        of_stages = [{name: (shape, dtype) for name, shape in trained.items()} for trained in self._stage.trained]
        return self._collect(of_stages, own)

    @contextmanager
    def whole(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Make the model of rank 0 whole inside the block: other stages send their tensors. Collective.

        dtype: dtype of all parameters, by default their own.
        """
        stage = self._stage
        if stage is None:
            yield
            return
        state = stage.model.state_dict()
        of_stages = [
            {name: (shape, (is_parameter and dtype) or own) for name, (shape, own, is_parameter) in each.items()}
            for each in stage.entries
        ]
        own = {name: state[name] for name in of_stages[self.mesh.stage]}
        found = self._collect(of_stages, own)
        others = {name: each.cpu() for name, each in found.items() if name not in own}
        with stage.whole(others) if self.mesh.world.rank == 0 else nullcontext():
            yield

    def _collect(
        self, of_stages: Sequence[Mapping[str, tuple[tuple[int, ...], torch.dtype]]], own: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return on rank 0 the tensors of all stages of replica 0, by name; `own` on other ranks.

        of_stages: shapes and dtypes of the tensors by stage. They are sent one by one.
        """
        mesh = self.mesh
        if mesh.replica == 0 and mesh.stage:
            for name in of_stages[mesh.stage]:
                mesh.between.exchange([(own[name].detach().contiguous(), 0)], []).wait()
        if mesh.replica or mesh.stage:
            return own
        found, device = dict(own), next(iter(own.values())).device
        for stage in range(1, mesh.stages):
            for name, (shape, dtype) in of_stages[stage].items():
                found[name] = torch.empty(shape, dtype=dtype, device=device)
                mesh.between.exchange([], [(found[name], mesh.rank_of_stage(stage))]).wait()
        return found


def _layout_of(values: Mapping[str, Any]) -> FlatLayout:
    found: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in values.items()}
    return FlatLayout(**found)
