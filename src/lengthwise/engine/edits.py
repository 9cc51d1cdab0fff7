"""What somebody wrote into the values that forward reads since they were published, taken into the master weights.

All values are compared with what was published, because a write to `.data` counts no change. Entries that nobody wrote
keep their exact master weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def take_edits(slices: Sequence[tuple[Tensor, slice]], exact: Tensor) -> None:
    """Take them where master weights `exact` are beside the values: nothing is read from the device.

    slices: of the values, with their places in `exact`.
    """
    for own, place in slices:
        kept = exact[place]
        kept.copy_(torch.where(own != kept.to(own.dtype), own.to(kept.dtype), kept))


def take_edits_to_host(slices: Sequence[tuple[Tensor, slice]], exact: Tensor, published: Tensor) -> None:
    """Take them to master weights on the host, where `published` is what was sent of these, in the values' dtype.

    That is sent again and compared on the device, for master weights are not cast twice; one read says of all slices
    whether there is a change.
    """
    changed = [(own != published[place].to(own.device, non_blocking=True)).any() for own, place in slices]
    for (own, place), is_changed in zip(slices, torch.stack(changed).tolist(), strict=True):
        if is_changed:
            now = own.to(published.device)
            there = now != published[place]
            exact[place][there] = now[there].to(exact.dtype)
            published[place].copy_(now)
