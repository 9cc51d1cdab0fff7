"""Choose how the loss of logits is computed, at a run's start: by torch's operations, or compiled to one pass.

Torch's operations read and write some 50 bytes a logit, in fp32. `torch.compile` joins the cast, the log-softmax, the
sum and their gradients, for all numbers of tokens. It is used where layers are compiled, and on GPUs, if it is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lengthwise.attention import Case, by_autograd, faults_of_ranks, prove
from lengthwise.comm import Transport
from lengthwise.models.computing import Computing, allow_variants
from lengthwise.models.loss import token_loss, token_losses, use_losses

Loss: TypeAlias = Callable[..., Tensor]

_ROWS = (72, 5)


def choose_losses(
    model: Any,
    transport: Transport,
    device: torch.device,
    *,
    dtype: torch.dtype,
    computing: Computing,
    say: Callable[[str], None] | None = None,
) -> None:
    """Choose and install the losses of a model's logits in `dtype`. Collective if they may be compiled.

    say: callback for the choice and its reason, by default a print on rank 0.
    """
    if not (computing.compile or (device.type == "cuda" and computing.fused_layers != "off")):
        return
    losses = compiled_losses()
    proof = prove(_cases(losses, model.config.vocab_size, dtype, device), dtype, device)
    against = faults_of_ranks(transport, {"loss": proof.fault}).get("loss")
    if against is None:
        use_losses(model, dtype, losses)
    done = f"compiled to one pass; {proof}" if against is None else f"by torch's operations; because {against}"
    if say is not None:
        say(f"loss: {done}")
    elif transport.rank == 0:
        print(f"lengthwise: loss: {done}", flush=True)


def compiled_losses(*, backend: str = "inductor") -> dict[Loss, Loss]:
    """Return `token_loss` and `token_losses` compiled for all numbers of tokens, by the functions themselves."""
    allow_variants()
    every = (token_loss, token_losses)
    return {each: partial(_as_proved, torch.compile(each, dynamic=True, backend=backend)) for each in every}


def _as_proved(loss: Loss, *given: Any) -> Tensor:
    """Run a compiled loss by the graph that was proved: it depends on autocast and torch's modes, the loss does not."""
    with torch._C.DisableTorchFunction(), torch.autocast(given[0].device.type, enabled=False):
        return loss(*given)


def _cases(losses: dict[Loss, Loss], words: int, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield sums with and without weights, and losses per token without gradients, with torch's in fp32 or wider."""
    random = torch.Generator().manual_seed(0)
    for rows in _ROWS:
        drawn = torch.randn((rows, words), generator=random, device="cpu", dtype=torch.float32)
        labels = torch.randint(words, (rows,), generator=random, device="cpu")
        labels[::3] = -100
        weights = torch.rand(rows, generator=random, device="cpu", dtype=torch.float32)
        logits, labels, weights = {"logits": (4 * drawn).to(device, dtype)}, labels.to(device), weights.to(device)
        for name, given in {"sum": None, "weighted sum": weights}.items():
            runs = [partial(_summed, each, labels, given) for each in (losses[token_loss], token_loss)]
            yield Case(name=f"{name} of {rows} tokens", run=partial(by_autograd, *runs, logits))
        yield Case(name=f"losses of {rows} tokens", run=partial(_each, losses[token_losses], labels, logits["logits"]))


def _summed(loss: Loss, labels: Tensor, weights: Tensor | None, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"loss": loss(inputs["logits"], labels, weights)}


@torch.no_grad()
def _each(loss: Loss, labels: Tensor, logits: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return {"losses": loss(logits, labels)}, {"losses": token_losses(wide, labels)}
