"""Check the weights of a model folder: whole ones in safetensors, none, or weights that cannot be loaded whole.

Only the index and the headers of files are read. Only a folder with nothing but config and tokenizer starts fresh
unasked: an incomplete download would otherwise train from random numbers.
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
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes; other dtypes (fp8, integers) need a scale
_WITHOUT_WEIGHTS = (
    *("config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "*.tiktoken", "spiece.model", "sentencepiece*.model"),
)
_FRESH = "Download the whole model again, in safetensors (pickles are never opened), or set `weights: fresh`."


def holds_weights(folder: Path) -> bool:
    """Return whether a model folder has weights to load; False for nothing but a config and a tokenizer.

    Raises:
        ConfigError: weights have another format, or a shard is missing, incomplete or lacks a tensor of the index.
    """
    found = sorted(path.name for path in folder.iterdir())
    # Transformers prefers a sharded checkpoint of torch to all others, and it would not be checked here.
    others = [name for name in found if fnmatch(name, "shard-*-model-*.safetensors")]
    if not others and _SINGLE in found:
        _tensor_names(folder, _SINGLE)
    elif not others and _INDEX in found:
        _check_shards(folder, _read_weight_map(folder))
    else:
        others = [name for name in found if not any(fnmatch(name, each) for each in _WITHOUT_WEIGHTS)]
        if others:
            raise _refuse(folder, f"neither, but {', '.join(others[:5])}{', ...' * (len(others) > 5)}")
        return False
    return True


def _read_weight_map(folder: Path) -> dict[str, str]:
    """Return the files of tensors by the index, all plain names of files in the folder."""
    try:
        index: Any = json.loads(read_plain(folder / _INDEX).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise _refuse(folder, f"{_INDEX}: {error}") from None
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise _refuse(folder, f"{_INDEX} without a weight_map of names of tensors to names of files")
    outside = sorted({name for name in names.values() if Path(name).name != name})
    if outside:
        raise _refuse(folder, f"{_INDEX}: weight_map names {outside[0]}, which is not the name of a file beside it")
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
    """Refuse weights that loading in `widest` would change: wider ones, and ones that are not floating-point.

    but: regular expressions of names of tensors that are not weights, such as buffers in older files.

    Raises:
        ConfigError: there are some; the first are named with their dtypes.
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
        expected = f"floating-point weights of 16 to {bits} bits, by the dtype of config.json"
        remedy = "Convert them to the dtype of config.json."
        raise ConfigError(f"model {folder}", expected=expected, got=got, remedy=remedy)


def check_finite(where: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse NaN and infinity in named tensors, in one pass without copies. where: source of the tensors.

    Raises:
        ConfigError: a tensor has some; the first tensors are named.
    """
    wrong = [name for name, tensor in tensors if not is_finite(tensor)]
    if wrong:
        got, remedy = (
            f"NaN or infinity in {first_names(wrong)}",
            "Download the weights again, or use earlier ones.",
        )
        raise ConfigError(where, expected="finite weights", got=got, remedy=remedy)


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has no NaN and no infinity; True for tensors without storage or of whole numbers."""
    if tensor.is_meta or not tensor.numel() or not tensor.is_floating_point():
        return True
    return all(bool(each.isfinite()) for each in torch.aminmax(tensor.detach()))


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the files of a folder's tensors, by name."""
    if (folder / _SINGLE).is_file():
        return dict.fromkeys(_tensor_names(folder, _SINGLE), _SINGLE)
    return _read_weight_map(folder)


def _tensor_names(folder: Path, name: str) -> list[str]:
    if (folder / name).exists() and not (folder / name).is_file():
        raise _refuse(folder, f"{name}: not a regular file")
    try:
        with safe_open(folder / name, framework="pt") as file:  # refuses a file of another length than its header's
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise _refuse(folder, f"{name}: {error}") from None


def first_names(names: Sequence[str]) -> str:
    """Join the first three of many names."""
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _refuse(folder: Path, got: str) -> ConfigError:
    return ConfigError(f"model {folder}", expected=f"whole weights in {_SINGLE} or {_INDEX}", got=got, remedy=_FRESH)
