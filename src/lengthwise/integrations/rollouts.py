"""Prompts and completions as TRL pads them, and as rows of a plan; those of all ranks as one batch.

Numbers of tokens stand as in TRL's columns of completions, (rows, width) a batch, all batches in one vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid

from lengthwise.core.errors import ConfigError, DataError
from lengthwise.data import NO_LOSS
from lengthwise.integrations.token_losses import SLOTS
from lengthwise.models.image_kinds import IMAGE_COLUMNS, PIXELS
from lengthwise.models.images import MODALITIES, joined_images
from lengthwise.session import Session
from lengthwise.session.row_batch import Row

PROMPTS, COMPLETIONS = ("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask")
_PADDED_WITH_ONES = ("tool_mask",)
_COUNTS = ("num_images", "num_tiles")  # lists: numbers of each row
OF_IMAGES = (*IMAGE_COLUMNS, *_COUNTS)
_OF_OTHER_IMAGES = ("pixel_attention_mask", "spatial_shapes")  # of families whose images do not train


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns of all ranks' rows as one batch, in the order of ranks, padded to one width.

    A column without dimensions has the same number on all ranks. A rank whose rows have no images lacks their columns.
    """
    names = dict.fromkeys(name for part in parts for name in part if name not in MODALITIES)
    found: dict[str, Any] = {
        name: _joined(name, [part[name] for part in parts if name in part]) for name in names if name not in _COUNTS
    }
    for name in _COUNTS:
        if name in names:
            found[name] = [each for part in parts for each in part.get(name) or [0] * len(part["prompt_ids"])]
    return found


def _joined(name: str, parts: Sequence[Any]) -> Any:
    if name in IMAGE_COLUMNS:
        return joined_images(parts, name)
    if parts[0].dim() == 0:
        return parts[0]
    if parts[0].dim() == 1:
        return torch.cat(list(parts))
    width, fill = max(part.shape[1] for part in parts), int(name in _PADDED_WITH_ONES)
    lacking = [width - part.shape[1] for part in parts]
    sides = [(each, 0) if name in PROMPTS else (0, each) for each in lacking]
    return torch.cat([F.pad(part, side, value=fill) for part, side in zip(parts, sides, strict=True)])


def num_slots(batch: Mapping[str, Tensor]) -> int:
    """Return how many numbers a batch has, padding included."""
    return batch["completion_mask"].numel()


def planned_rows(batches: Sequence[Mapping[str, Tensor]], every: bool = False) -> list[Row]:
    """Return the rows of a plan, with labels on completions only, and the places of their predictions' numbers.

    every: True to keep the prompt of a completion that is masked as a whole, for routers. Else it has no row; if all
    are masked, one prompt without a label is the step.

    Raises:
        DataError: a prompt without a token, so that nothing predicts the first one of its completion.
    """
    found, first = list[Row](), 0
    for batch in batches:
        found += _rows(batch, first, every)
        first += num_slots(batch)
    if found:
        return found
    prompt = batches[0]["prompt_ids"][0][batches[0]["prompt_mask"][0].bool()].cpu().numpy()
    return [{"input_ids": prompt, "labels": np.full(len(prompt), NO_LOSS), SLOTS: np.zeros(len(prompt), int)}]


def _rows(batch: Mapping[str, Tensor], first: int, every: bool) -> Iterator[Row]:
    prompts, prompt_mask, completions, mask = (batch[name].cpu().numpy() for name in (*PROMPTS, *COMPLETIONS))
    width, images = mask.shape[1], _images(batch)
    for number, has_token in enumerate(mask.astype(bool)):
        prompt, completion = prompts[number][prompt_mask[number].astype(bool)], completions[number][has_token]
        if not len(completion) and not every:
            continue
        if not len(prompt):
            remedy = "Give the tokenizer a token that begins a text, or leave the row out."
            raise DataError("prompt", expected="at least one token", got="none", remedy=remedy)
        labels = np.concatenate([np.full(len(prompt), NO_LOSS), completion])
        # At each token the place of the one that it predicts; all others add 0 to the first place of all.
        places = first + number * width + np.flatnonzero(has_token)
        slots = np.concatenate([np.zeros(len(prompt) - 1, int), places, [0]])
        row = {"input_ids": np.concatenate([prompt, completion]), "labels": labels, SLOTS: slots}
        yield {**row, **{name: each[number] for name, each in images.items() if len(each[number])}}


def _images(batch: Mapping[str, Any]) -> dict[str, Sequence[Tensor]]:
    """Return the image columns of a batch, a tensor a row.

    Raises:
        DataError: the family has other columns of images, or TRL does not know the images of a row.
    """
    if batch.get(PIXELS) is None:
        return {}
    given = {name: each for name, each in batch.items() if each is not None}
    split: dict[str, Any] = split_pixel_values_by_grid(given)  # type: ignore[assignment]
    others = [name for name in _OF_OTHER_IMAGES if name in given]
    if others or isinstance(split[PIXELS], Tensor):
        remedy = "Take the images out of the prompts, or crops out of the processor."
        got = ", ".join(others) or f"{len(split[PIXELS])} {PIXELS} for {sum(given.get(_COUNTS[0], []))} images"
        raise DataError("dataset", expected="images that TRL splits by row", got=got, remedy=remedy)
    return {name: split[name] for name in IMAGE_COLUMNS if name in split}


def flat(batches: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    """Return a column of all batches' tokens, (tokens,); one of rows is repeated over the tokens of each."""
    found = list[Tensor]()
    for batch in batches:
        values = batch[name] if batch[name].dim() > 1 else batch[name][:, None]
        found.append(values.expand(batch["completion_mask"].shape).reshape(-1))
    return torch.cat(found)


def refuse_long_completions(session: Session, most: int | None) -> None:
    """Refuse a `max_completion_length` that the ranks do not hold with its prompt."""
    held = session.longest_tokens - 1  # a prompt has a token
    if most is not None and most > held:
        ranks = f"{session.world_size} x capacity_tokens {session.capacity_tokens}"
        remedy = "Lower it, run on more ranks, or raise capacity_tokens."
        expected = f"at most {held}, what the ranks hold of a completion and its prompt ({ranks})"
        raise ConfigError("max_completion_length", expected=expected, got=str(most), remedy=remedy)
