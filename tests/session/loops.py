"""A loop as its users have it, planned and plain, over the same steps; and processes that joined before us."""

import copy
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from testing.ranks import fork_ranks
from testing.saved import whole_state
from testing.small import plain_loop, small_model, steps_of
from torch.utils._python_dispatch import TorchDispatchMode

from lengthwise.core.errors import LengthwiseError
from lengthwise.models import keep_double
from lengthwise.session import Session

torch.set_num_threads(1)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1)
CONSTANT = partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0)


class LargestTensor(TorchDispatchMode):
    """Counts the numbers and bytes of the largest tensor that operations inside the block make, backward included."""

    numbers = bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, torch.Tensor):
                self.numbers, self.bytes = max(self.numbers, each.numel()), max(self.bytes, each.nbytes)
        return made


def planned_loop(session, optimizer, scheduler, steps, *, limit=1.0):
    """The same loop, planned."""
    found = []
    for rows in steps:
        result = session.backward(rows)
        session.clip_grad_norm_(limit)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.append((result.loss, result.grad_norm))
    return found


def both_loops(make_optimizer, *, dtype=torch.float64, precision=None, capacity=64, model=None, steps=None, **options):
    """Return the worst relative differences of loss, norm and weights between the planned loop and the plain one."""
    model = small_model(dtype) if model is None else model
    plain, steps, found = copy.deepcopy(model), steps or steps_of(), []
    for each in (model, plain):
        optimizer = make_optimizer([weights for weights in each.parameters() if weights.requires_grad])
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        if each is model:
            with Session(model, optimizer, capacity_tokens=capacity, precision=precision, **options) as session:
                found.append(planned_loop(session, optimizer, scheduler, steps))
                exact = whole_state(session).get("master_weights", {})  # of rank 0
        else:
            autocast = torch.bfloat16 if precision else None
            found.append(plain_loop(plain, optimizer, scheduler, steps, dtype=dtype, autocast=autocast))
    losses, norms = zip(*(zip(*each, strict=True) for each in found), strict=True)
    trained = {name: each for name, each in plain.named_parameters() if each.requires_grad}
    is_cut = options.get("shard") in ("zero3", "hybrid") or "stages" in options
    own = exact if is_cut else {name: model.get_parameter(name) for name in trained}
    weights = [(own[name] - trained[name]).norm() / trained[name].norm() for name in own]
    return (
        max(abs(a - b) / abs(b) for a, b in zip(losses[0], losses[1], strict=True)),
        max(abs(a - b) / abs(b) for a, b in zip(norms[0], norms[1], strict=True)),
        max((each.item() for each in weights), default=0.0),
    )


def in_ranks(work, ranks, folder):
    """Call `work(rank)` in processes that have joined a process group of their own; return what each returned."""
    meeting = Path(folder) / "meeting"

    def rank_work(world):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if ranks > 1:
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=world.rank, world_size=ranks)
        result = work(world.rank)
        if ranks > 1:
            dist.barrier()  # the group is still that of the loop
            dist.destroy_process_group()
        return result

    found = fork_ranks(rank_work, ranks)
    meeting.unlink(missing_ok=True)
    return found


def said(work, kind=LengthwiseError):
    """Return the message of what is refused; "" where nothing is."""
    try:
        work()
    except kind as error:
        return str(error)
    return ""


def in_double(work):
    """Return the work of a rank, with the casts of Hugging Face models kept in fp64."""

    def rank_work(rank):
        with keep_double(torch.float64):
            return work(rank)

    return rank_work


def same(one, other):
    """Whether two results are the same, to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
