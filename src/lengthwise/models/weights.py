"""Which weights a model folder holds: whole ones in safetensors, none, or something that cannot be loaded whole.

The index and the header of every file are read, no tensor. Only a folder of config and tokenizer starts fresh unasked:
a download cut short would else train from random numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lengthwise.core.errors import ConfigError
from lengthwise.core.files import read_plain

WEIGHTS_FILES = _SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes; others (fp8, integers) are no weights without a scale
_WITHOUT_WEIGHTS = (
    *("config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "*.tiktoken", "spiece.model", "sentencepiece*.model"),
)
_FRESH = "Get the model again as a whole and in safetensors (pickles are never opened), or set `weights: fresh`."


def holds_weights(folder: Path) -> bool:
    """Return whether a model folder has weights to load; False for a config, perhaps with a tokenizer, and no more.

    Raises:
        ConfigError: weights of another format, or a shard that is missing, cut short or without a tensor of the index.
    """
    found = sorted(path.name for path in folder.iterdir())
    # A sharded checkpoint of torch goes before all others in transformers, and would not be checked here.
    others = [name for name in found if fnmatch(name, "shard-*-model-*.safetensors")]
    if not others and _SINGLE in found:
        _tensor_names(folder, _SINGLE)
    elif not others and _INDEX in found:
        _check_shards(folder, _read_weight_map(folder))
    else:
        others = [name for name in found if not any(fnmatch(name, each) for each in _WITHOUT_WEIGHTS)]
        if others:
            raise _refuse(folder, f"none of these, but {', '.join(others[:5])}{', ...' * (len(others) > 5)}")
        return False
    return True


def _read_weight_map(folder: Path) -> dict[str, str]:
    """Return the file of each tensor by the index; all are plain names of files in the folder."""
    try:
        index: Any = json.loads(read_plain(folder / _INDEX).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise _refuse(folder, f"{_INDEX}: {error}") from None
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise _refuse(folder, f"{_INDEX} without a weight_map of names of tensors to names of files")
    outside = sorted({name for name in names.values() if Path(name).name != name})
    if outside:
        raise _refuse(folder, f"{_INDEX}: weight_map names {outside[0]}, which is no plain name of a file beside it")
    return names


def _check_shards(folder: Path, weight_map: dict[str, str]) -> None:
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise _refuse(folder, f"{len(missing)} of {len(shards)} files of {_INDEX} missing ({first_names(missing)})")
    there = {(tensor, name) for name in shards for tensor in _tensor_names(folder, name)}
    lost = sorted(tensor for tensor, name in weight_map.items() - there)
    if lost:
        raise _refuse(folder, f"{len(lost)} tensors of {_INDEX} not in their files ({first_names(lost)})")


def check_dtypes(folder: Path, *, widest: torch.dtype, but: Sequence[str] = ()) -> None:
    """Refuse weights that loading in `widest` would change: of wider numbers, or of none that are floating-point.

    but: regular expressions for names of what is no weight, buffers that older files have.

    Raises:
        ConfigError: names the first tensors and their dtypes.
    """
    files, wrong = sorted(set(tensor_files(folder).values())), []
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            dtypes = {each: str(file.get_slice(each).get_dtype()) for each in file.keys()}  # noqa: SIM118 - no mapping
        for each, kind in dtypes.items():
            is_weight = not any(re.search(pattern, each) for pattern in but)
            if is_weight and not 0 < WIDTHS.get(kind, 0) <= widest.itemsize:
                wrong.append(f"{each} {kind}")
    if wrong:
        bits, got = 8 * widest.itemsize, f"{len(wrong)} others: {first_names(wrong)}"
        expected = f"weights of floating-point numbers of 16 to {bits} bits, by the dtype of config.json"
        remedy = "Convert them to what config.json says."
        raise ConfigError(f"model {folder}", expected=expected, got=got, remedy=remedy)


def check_finite(where: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse NaN and infinity in tensors, by their names; one pass over each, without a copy. `where`: they are from.

    Raises:
        ConfigError: names the first of them.
    """
    wrong = [name for name, tensor in tensors if not is_finite(tensor)]
    if wrong:
        got, remedy = (
            f"NaN or infinity in {first_names(wrong)}",
            "Get the weights again, or take earlier ones.",
        )
        raise ConfigError(where, expected="finite weights", got=got, remedy=remedy)


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has storage with no NaN and no infinity in it, or has none, or is of whole numbers."""
    if tensor.is_meta or not tensor.numel() or not tensor.is_floating_point():
        return True
    return all(bool(each.isfinite()) for each in torch.aminmax(tensor.detach()))


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor of a folder with weights."""
    if (folder / _SINGLE).is_file():
        return dict.fromkeys(_tensor_names(folder, _SINGLE), _SINGLE)
    return _read_weight_map(folder)


def _tensor_names(folder: Path, name: str) -> list[str]:
    if (folder / name).exists() and not (folder / name).is_file():
        raise _refuse(folder, f"{name}: not a regular file")
    try:
        with safe_open(folder / name, framework="pt") as file:  # refuses a file that is not as long as its header says
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise _refuse(folder, f"{name}: {error}") from None


def first_names(names: Sequence[str]) -> str:
    """List the first three of many names."""
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def _refuse(folder: Path, got: str) -> ConfigError:
    return ConfigError(f"model {folder}", expected=f"whole weights in {_SINGLE} or {_INDEX}", got=got, remedy=_FRESH)
