"""Is the plan's arithmetic that of one process? The first thing a careful user runs on their own model and data.

The first global batch goes once over N ranks under its plan, through the very path of training up to the reduced
gradient, and once through the plain Hugging Face model (its own attention, none of ours) one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lengthwise.attention import choose_kernel
from lengthwise.comm import SoloTransport, World
from lengthwise.core.plan import Plan
from lengthwise.data import NO_LOSS, Dataset
from lengthwise.models import DTYPES, build_model, keep_double, plain_attention, plain_logits, token_loss
from lengthwise.train.batch import StepBatch
from lengthwise.train.flat import FlatParameters
from lengthwise.train.job import Job
from lengthwise.train.trainer import connect
from lengthwise.train.work import run_plan

TOLERANCES = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 2e-2}
_FLOOR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Differences between N ranks and one process; all relative.

    `gradients` maps each parameter to |difference| / max(|reference|, 1e-3 of the median parameter's norm), L2.
    """

    plan: Plan
    loss: float
    reference_loss: float
    gradients: dict[str, float]
    tolerance: float

    @property
    def loss_difference(self) -> float:
        """Relative difference of the two losses."""
        return abs(self.loss - self.reference_loss) / max(abs(self.reference_loss), 1e-30)

    @property
    def worst_gradient(self) -> float:
        """The largest difference of any parameter; NaN counts as infinite."""
        return max(float("inf") if difference != difference else difference for difference in self.gradients.values())

    @property
    def passed(self) -> bool:
        """Whether loss and every gradient are within the tolerance."""
        return self.loss_difference <= self.tolerance and self.worst_gradient <= self.tolerance


def first_batch(job: Job) -> StepBatch:
    """Return the global batch of step 1."""
    return next(job.batches())


def verify_rank(job: Job, plan: Plan, world: World, on_phase: Callable[[str], None]) -> Verification | None:
    """Compute both and compare; None on ranks other than 0, which are done once gradients are gathered."""
    transport, batch = connect(world, job, on_phase), first_batch(job)
    dtype = DTYPES[job.config.precision]
    model = build_model(job.model, seed=job.config.seed).to(world.device)
    flat = FlatParameters(model, transport, dtype=dtype)
    with keep_double(dtype):
        work = run_plan(model, plan, batch, transport, choose_kernel(world.device), name="verify")
    transport.phase = "verify, gathering gradients"
    loss = torch.tensor([work.loss_sum], dtype=torch.float64)
    transport.all_reduce(loss)
    flat.reduce_gradients()
    gradients = flat.gather_gradients()
    transport.close()
    if world.rank:
        return None
    on_phase("verify, one process")
    plain = build_model(job.model, seed=job.config.seed, attention=plain_attention(job.model)).to(world.device)
    expected_loss, expected = plain_gradients(plain, job.dataset, batch.ids, dtype)
    return Verification(
        plan=plan,
        loss=loss.item() / batch.loss_tokens,
        reference_loss=expected_loss,
        gradients=gradient_differences(gradients, expected),
        tolerance=TOLERANCES[job.config.precision],
    )


def gradient_differences(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative L2 difference of each tensor, floored by 1e-3 of the median tensor's norm."""
    norms = {name: tensor.double().norm().item() for name, tensor in expected.items()}
    floor = _FLOOR * sorted(norms.values())[len(norms) // 2]
    return {
        name: (gradients[name].double() - tensor.double()).norm().item() / max(norms[name], floor, 1e-300)
        for name, tensor in expected.items()
    }


def plain_gradients(
    model: nn.Module, dataset: Dataset, ids: Sequence[int], dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    """Return (loss, gradients) of a plain Hugging Face model in this process, one sequence at a time.

    Shift and loss-token count are made here from the data's labels, on purpose not by the code that is checked: logits
    of all but the last position against labels of all but the first.
    """
    flat, loss_sum = FlatParameters(model, SoloTransport(), dtype=dtype), 0.0
    device = flat.values.device
    num_loss_tokens = sum(int((dataset.labels(i)[1:] != NO_LOSS).sum()) for i in ids)
    with keep_double(dtype):
        for i in ids:
            tokens, labels = (
                torch.from_numpy(x.astype("int64")).to(device) for x in (dataset.tokens(i), dataset.labels(i))
            )
            loss = token_loss(plain_logits(model, tokens)[:-1], labels[1:])
            (loss / num_loss_tokens).backward()
            loss_sum += loss.item()
    flat.reduce_gradients()
    return loss_sum / num_loss_tokens, flat.gather_gradients()
