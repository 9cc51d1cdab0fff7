"""Prove functions on the device where a run will use them: results and gradients are compared with a reference's.

A wrong function may give finite numbers and a worse model, without an error. Attention kernels (`proof_cases`),
packages for layers with states and convolutions, Liger's layers and compiled losses are proved here. No rank uses a
function that is wrong or missing on any rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lengthwise.comm import Transport, share_first

Results: TypeAlias = Mapping[str, Tensor]
Function: TypeAlias = Callable[[dict[str, Tensor]], Results]

_HALF = (2e-2, 4e-3, 5e-3)
TOLERANCES = {torch.float64: (1e-10,) * 3, torch.float32: (1e-4,) * 3, torch.bfloat16: _HALF, torch.float16: _HALF}
"""Allowed norm of the difference; difference of the projection on the expected tensor, which noise hardly changes (both
relative); and difference of log-sum-exp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call. run: returns its results and gradients, and the expected ones."""

    name: str
    run: Callable[[], tuple[Results, Results]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a comparison found on this rank. fault: the errors of the first wrong case, or None."""

    fault: str | None
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"proved in {self.seconds:.2f} s"


def prove(cases: Iterable[Case], dtype: torch.dtype, device: torch.device) -> Proof:
    """Run the cases of a function that computes in `dtype` on `device`. May run out of memory."""
    start = time.perf_counter()
    # The caller's torch modes are for the model: one turns fp32 to fp64, others count or record.
    with (
        torch._C.DisableTorchFunction(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        fault = _fault(cases, dtype)
    return Proof(fault=fault, seconds=time.perf_counter() - start)


def faults_of_ranks(transport: Transport | None, own: Mapping[str, str | None]) -> dict[str, str]:
    """Return the faults of all ranks by function. Collective: `own` has the same functions on all ranks.

    transport: if None, this rank's faults are all.
    """
    found: dict[str, str] = {}
    while own:  # each turn adds one rank's
        new = {name: fault for name, fault in own.items() if fault is not None and name not in found}
        new = new if transport is None else share_first(transport, new)
        if not new:
            break
        found |= new
    return found


def by_autograd(candidate: Function, reference: Function, inputs: Results) -> tuple[Results, Results]:
    """Return results and gradients of all inputs, of a function and of its reference in fp32 or wider."""
    wide = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in inputs.items()}
    return _with_gradients(candidate, inputs), _with_gradients(reference, wide)


def _with_gradients(function: Function, inputs: Results) -> Results:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    found, random = function(dict(leaves)), torch.Generator().manual_seed(1)
    drawn = (torch.randn(x.shape, generator=random, device="cpu", dtype=torch.float32) for x in found.values())
    # Rounded to bf16, so that they are the same in every dtype.
    grads = [each.bfloat16().to(x.device, x.dtype) for x, each in zip(found.values(), drawn, strict=True)]
    gradients = torch.autograd.grad([*found.values()], [*leaves.values()], grads)
    return {**found, **{f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}}


def _fault(cases: Iterable[Case], dtype: torch.dtype) -> str | None:
    name, wrong = "inputs", list[str]()
    # Where the process allows TF32 in matrix products, fp32 is as exact as bf16.
    short = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    try:
        for case in cases:
            name = case.name
            found, wanted = case.run()
            allowed = _HALF if short else TOLERANCES[dtype]
            wrong = [line for each, x in wanted.items() for line in _differences(each, found[each], x, *allowed)]
            if wrong:
                break
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - after any error the function cannot be used
        wrong = [f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"]
    return f"{name}, {str(dtype).removeprefix('torch.')}: {'; '.join(wrong)}" if wrong else None


def _differences(name: str, found: Tensor, wanted: Tensor, near: float, same_size: float, lse: float) -> list[str]:
    """Return a description of a tensor's difference from the expected one, if it is more than is allowed."""
    if found.shape != wanted.shape:
        return [f"{name} has the shape {tuple(found.shape)}, not {tuple(wanted.shape)}"]
    if not found.isfinite().all():
        return [f"{name} is not finite"]
    found, wanted = found.detach().double(), wanted.detach().double()
    if name == "lse":
        off = float((found - wanted).abs().max())
        return [] if off <= lse else [f"lse is off by {off:.2g}, but {lse:g} is allowed"]
    norm = wanted.norm()
    distance = float((found - wanted).norm() / norm)
    if distance > near:
        return [f"{name} is off by {distance:.2g} of its norm, but {near:g} is allowed"]
    size, allowed = float((found * wanted).sum() / norm**2), same_size + 8 * distance / wanted.numel() ** 0.5
    if abs(size - 1) > allowed:
        return [f"{name} is {size:.4f} times the expected one, but 1 +- {allowed:.2g} is allowed"]
    return []
