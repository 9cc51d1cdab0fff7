"""Parameters of a model cut by rows over ranks: torch's FSDP2, whose collectives go over a `Transport`.

Each module given is a group: its parameters are gathered right before its forward and its backward, and let go after
each; gradients are summed, in `reduce_dtype`, when its backward is done. All ranks must run the same groups in the same
order. Of ZeRO stage 3 (arXiv 1910.02054); torch's is Zhao et al. 2023 (arXiv 2304.11277).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from lengthwise.comm.torch_transport import TorchTransport
from lengthwise.comm.transport import Around, Transport


class ShardedModules:
    """Modules whose parameters, without storage (on the meta device) before, lie over the ranks from now on.

    groups: modules that are gathered one at a time. root: holds them, and is gathered as long as it runs. dtype: what
    gathered parameters have; stored ones keep theirs.
    """

    def __init__(
        self,
        groups: Sequence[nn.Module],
        root: nn.Module,
        transport: Transport,
        *,
        device: torch.device,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> None:
        self._mesh = DeviceMesh.from_group(_group_of(transport), device.type)
        self.position, self.size = self._mesh.get_local_rank(), self._mesh.size()
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        gather: Any = _AllGather(transport)  # the classes that they stand for are private in torch
        reduce: Any = _ReduceScatter(transport)
        for each in (*groups, root):
            fully_shard(each, mesh=self._mesh, mp_policy=policy)
            assert isinstance(each, FSDPModule), "what fully_shard makes of a module"
            each.set_custom_all_gather(gather)
            each.set_custom_reduce_scatter(reduce)
            each.set_gradient_divide_factor(1.0)  # the loss is divided, once
            each.set_force_sum_reduction_for_comms(True)
            if hasattr(each, "set_reduce_scatter_unused_params"):  # torch 2.13; what no token of a rank reaches is 0
                each.set_reduce_scatter_unused_params(True)
        self._root: Any = root

    def put(self, parameter: nn.Parameter, rows: Tensor, gradient: Tensor | None) -> nn.Parameter:
        """Give a parameter its rows of this rank, padded to those of the first; return what takes its place.

        gradient: of the same rows, in which gradients of all backward passes add up; None: it does not train.
        """
        dense = torch.empty(parameter.shape, device="meta").stride()
        made = nn.Parameter(self._whole(rows, parameter.shape, dense), requires_grad=gradient is not None)
        if gradient is not None:
            made.grad = self._whole(gradient[: self.own_rows(parameter.shape[0])], parameter.shape, dense)
        return made

    def _whole(self, rows: Tensor, shape: torch.Size, stride: Sequence[int]) -> DTensor:
        return DTensor.from_local(rows, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=tuple(stride))

    def own_rows(self, rows: int) -> int:
        """Return how many of a parameter's rows this rank has."""
        most = -(-rows // self.size)
        return max(0, min(most, rows - self.position * most))

    def let_go(self) -> None:
        """Let gathered parameters go that are still there: the next forward gathers them anew."""
        self._root.reshard()


def is_sharded(parameter: Tensor) -> bool:
    """Whether a parameter is one of which each rank has some rows."""
    return isinstance(parameter, DTensor)


def rows_here(parameter: Tensor) -> Tensor:
    """Return what this rank has of a parameter that is sharded."""
    assert isinstance(parameter, DTensor), type(parameter)
    rows: Any = parameter
    return rows.detach().to_local().detach()


def _group_of(transport: Transport) -> dist.ProcessGroup:
    while isinstance(transport, Around):
        transport = transport.inner
    assert isinstance(transport, TorchTransport), f"parameters are sharded over processes, not over {transport}"
    return transport.collectives()


class _OverTransport:
    """Room for a collective of FSDP2, and the transport that it goes over."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_OverTransport):
    """Time-outs, phases and clocks are those of every other collective; on a GPU the current stream waits for it."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        del group, async_op
        self._transport.all_gather(output_tensor, input_tensor)


class _ReduceScatter(_OverTransport):
    """As for `_AllGather`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        del group, async_op
        assert op == dist.ReduceOp.SUM, f"gradients are summed, not {op}"
        self._transport.reduce_scatter(output_tensor, input_tensor)
