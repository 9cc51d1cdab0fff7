"""The parameters of one stage of a pipeline: flat ZeRO-1 over the replicas of the stage (`engine.replicated`).

A tied head belongs to the embedding, on the first stage, which alone updates it. The last stage has a copy: before the
sum over the replicas it sends its gradient there, and after each update it takes the values. So both are equal to the
bit, the norm counts it once, and it has one state of the optimizer. Costs two messages of the embedding's size a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lengthwise.comm import Mesh, broadcast_bytes
from lengthwise.engine.flat_layout import BUCKET_ENTRIES, FlatLayout, join_stages
from lengthwise.engine.parameters import SavedParameters, refuse_parts
from lengthwise.engine.replicated import FlatParameters
from lengthwise.models import ModelStage, wrapped_layers


class StageParameters(FlatParameters):
    """`Parameters` of a stage; what rank 0 of the stage's replicas has of them counts, as for `FlatParameters`.

    The sums of the last backward are not begun early: it may be one of several chunks.
    """

    def __init__(
        self,
        stage: ModelStage,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        bucket_entries: int = BUCKET_ENTRIES,
        overlaps: bool = False,
        values_late: bool = False,
        keeps_frozen: bool = False,
        exact_on: torch.device | None = None,
    ) -> None:
        self.stage, self.mesh = stage, mesh
        self._copy: nn.Parameter | None = None  # of a tied head, which trains in no buffer of this stage
        self._tied_gradient: Tensor | None = None
        tied = stage.tied_weight()
        is_tied, is_copy = tied is not None and tied.requires_grad, mesh.is_last
        if tied is not None and is_copy:
            tied.requires_grad_(False)  # it is in no flat buffer here
        layers: Sequence[nn.Module] = wrapped_layers(stage.model)
        super().__init__(
            stage.model,
            mesh.replicas,
            dtype=dtype,
            device=device,
            layers=layers,
            bucket_entries=bucket_entries,
            overlaps=overlaps,
            values_late=values_late,
            keeps_frozen=keeps_frozen,
            exact_on=exact_on,
        )
        self._tied = stage.tied_weight()
        if is_tied:
            self._tied_gradient = self._begin_copy() if is_copy else self._embedding_gradient()
        self.share_tied(from_first=True)

        self.saved = self._join_saved()
        self._is_saving = mesh.stages == 1
        refuse_parts(stage.model, lambda: self._is_saving)

    def _join_saved(self) -> SavedParameters:
        """Return where the parameters of all stages lie. Collective."""
        own = {"layout": asdict(self.layout), "names": self.names, "shapes": self.shapes}
        world = self.mesh.world
        sent = [
            json.loads(broadcast_bytes(world, json.dumps(own).encode() if world.rank == stage else None, source=stage))
            for stage in range(self.mesh.stages)  # these ranks are the stages of replica 0
        ]
        layouts = [_layout_of(one["layout"]) for one in sent]
        return SavedParameters(
            layout=join_stages(layouts),
            names=[name for one in sent for name in one["names"]],
            shapes=[tuple(shape) for one in sent for shape in one["shapes"]],
            rank=self.mesh.replica,
        )

    def _begin_copy(self) -> Tensor:
        """Let the head's gradients add up beside the flat buffer."""
        self._copy = copy = self._tied
        assert copy is not None
        copy.requires_grad_(True)
        gradient = torch.zeros_like(copy, dtype=self.grads.dtype)
        if self._is_exact:
            copy.grad = gradient  # autograd adds in place
        else:
            copy.register_post_accumulate_grad_hook(partial(self._take_copy_gradient, gradient))
        return gradient

    def _take_copy_gradient(self, gradient: Tensor, copy: nn.Parameter) -> None:
        if copy.grad is not None and self._collects:
            gradient.add_(copy.grad)
            copy.grad = None

    def _of(self, model: nn.Module) -> list[nn.Parameter]:
        return [each for each in super()._of(model) if each is not self._copy]

    def attach_gradients(self) -> None:
        """See that the stage has the parameters that were made, and these and a tied head their gradients.

        Raises:
            ModelRefused: see `FlatParameters.attach_gradients`.
        """
        super().attach_gradients()
        if self._copy is not None:
            assert self._tied_gradient is not None, "of a copy"
            self._tied_gradient.zero_()
            self._copy.grad = self._tied_gradient if self._is_exact else None

    def detach_gradients(self) -> None:
        """Leave the stage's own gradients to others until they are attached again."""
        super().detach_gradients()
        if self._copy is not None:
            self._copy.grad = None

    def _embedding_gradient(self) -> Tensor:
        place = next(i for i, each in enumerate(self._of(self._model)) if each is self._tied)
        return self.views(self.grads)[place]

    def begin_reducing(self) -> None:
        """Add the gradient of a tied head to that of the embedding, then begin the sums, where `overlaps`."""
        gradient = self._tied_gradient
        if gradient is not None and self.mesh.is_last:
            self.mesh.between.exchange([(gradient, self.mesh.rank_of_stage(0))], []).wait()
            gradient.zero_()  # it has been added there: a session may run another backward before it updates
        elif gradient is not None:
            arriving = torch.empty_like(gradient)
            self.mesh.between.exchange([], [(arriving, self.mesh.rank_of_stage(self.mesh.stages - 1))]).wait()
            gradient.add_(arriving)
        super().begin_reducing()

    def publish(self) -> None:
        """Give every rank of the stage its parameters, and the last stage those of a tied head."""
        super().publish()
        if self._tied_gradient is not None:
            self.published()
            self._give_values()

    def _give_values(self, *, from_first: bool = True) -> None:
        assert self._tied is not None
        values, mesh = self._tied.data, self.mesh  # data: no change as autograd counts changes
        message = [(values, mesh.rank_of_stage(0 if mesh.is_last else mesh.stages - 1))]
        if mesh.is_last == from_first:
            mesh.between.exchange([], message).wait()
        else:
            mesh.between.exchange(message, []).wait()

    @property
    def tied(self) -> nn.Parameter | None:
        """The tied weight, on the stages that have it or its copy."""
        return self._tied

    def tied_norm(self) -> float:
        """Return the norm of a tied weight, the same to the bit on both stages that have it; 0.0 on others."""
        if self._tied is None:
            return 0.0
        return torch.linalg.vector_norm(self._tied.detach(), dtype=torch.float64).item()

    def share_tied(self, *, from_first: bool) -> None:
        """Give one of the two stages that have a tied weight the values of the other. Collective of the two."""
        if self._tied is not None:
            self._give_values(from_first=from_first)

    def clear_gradients(self) -> None:
        """Set the gradients of this rank to zero."""
        super().clear_gradients()
        if self._tied_gradient is not None and self.mesh.is_last:
            self._tied_gradient.zero_()

    def gather_gradients(self) -> dict[str, Tensor]:
        """Return the reduced gradient of every parameter of the model on rank 0, of the stage elsewhere. Collective."""
        own = super().gather_gradients()
        dtype = self.grads.dtype
        of_stages = [{name: (shape, dtype) for name, shape in trained.items()} for trained in self.stage.trained]
        return collect_stages(self.mesh, of_stages, own)

    @contextmanager
    def whole_on_first(self, *, trained_only: bool) -> Iterator[None]:
        """Let the model of rank 0 be whole inside the block; the other stages send it theirs. Collective."""
        del trained_only  # adapters are not cut yet
        self.published()
        self._is_saving = True
        state = self.stage.model.state_dict()
        of_stages = [
            {name: (shape, dtype or self.values.dtype) for name, (shape, dtype) in entries.items()}
            for entries in self.stage.entries
        ]
        own = {name: state[name] for name in of_stages[self.mesh.stage]}
        found = collect_stages(self.mesh, of_stages, own)
        others = {name: each.cpu() for name, each in found.items() if name not in own}
        try:
            with self.stage.whole(others) if self.mesh.world.rank == 0 else nullcontext():
                yield
        finally:
            self._is_saving = False


def _layout_of(values: Mapping[str, Any]) -> FlatLayout:
    return FlatLayout(
        sizes=tuple(values["sizes"]),
        starts=tuple(values["starts"]),
        borders=tuple(values["borders"]),
        bucket_of=tuple(values["bucket_of"]),
        world_size=values["world_size"],
    )


def collect_stages(
    mesh: Mesh, of_stages: Sequence[Mapping[str, tuple[tuple[int, ...], torch.dtype]]], own: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return on rank 0 the tensors of all stages, by name, from the ranks of replica 0; those of this rank elsewhere.

    of_stages: shapes and dtypes of the tensors of each stage. They come one by one.
    """
    if mesh.replica:
        return own
    found, like = dict(own), next(iter(own.values()))
    if mesh.stage:
        for name in of_stages[mesh.stage]:
            mesh.between.exchange([(own[name].detach().contiguous(), 0)], []).wait()
        return found
    for stage in range(1, mesh.stages):
        for name, (shape, dtype) in of_stages[stage].items():
            found[name] = torch.empty(shape, dtype=dtype, device=like.device)
            mesh.between.exchange([], [(found[name], mesh.rank_of_stage(stage))]).wait()
    return found
