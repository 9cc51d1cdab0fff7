"""A rank's file of a checkpoint: written with its digest, checked before it is read, at any number of ranks.

It has a tensor (entries,) of the rank's shard for "master_weights", and for every optimizer state with one value an
entry, by its own name ("exp_avg", "momentum_buffer").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lengthwise.checkpoint.manifest import File, Manifest, file_name
from lengthwise.comm import Transport, raise_together
from lengthwise.core.errors import OutputError
from lengthwise.core.files import make_readable, read_json, sync
from lengthwise.data.digests import file_digest
from lengthwise.engine.flat_layout import FlatLayout
from lengthwise.engine.parameters import MASTER_WEIGHTS, Parameters

# States that are means or sums of squares, or largest magnitudes.
NOT_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf")
_AT_ONCE = 1 << 24  # entries of a state per check

_DIGEST = ".digest"  # beside a rank's file until the commit

Kept = Mapping[str, Mapping[str, float | None]]  # as `OptimizerState.states`


def write_part(folder: Path, rank: int, state: Mapping[str, Tensor], kept: Kept | None = None) -> None:
    """Write and sync a rank's file, and beside it a note with its size, digest and the kept states."""
    path = folder / file_name(rank)
    save_file(dict(state), path)
    make_readable(path)
    sync(path)
    row = {"num_bytes": path.stat().st_size, "sha256": file_digest(path), "kept": kept or {}}
    path.with_suffix(_DIGEST).write_text(json.dumps(row), encoding="utf-8")
    sync(path.with_suffix(_DIGEST))


def take_digests(folder: Path, ranks: int) -> tuple[dict[str, File], dict[str, Mapping[str, float | None]]]:
    """Read and remove the notes of all ranks; return (sizes and digests by file, kept states by parameter).

    OutputError: a rank's note is missing, or ranks have different states of a parameter.
    """
    files, kept = dict[str, File](), dict[str, Mapping[str, float | None]]()
    for rank in range(ranks):
        note = (folder / file_name(rank)).with_suffix(_DIGEST)
        try:
            row = read_json(note)
            own: Kept = row.pop("kept")
            files[file_name(rank)] = File(**row)
            note.unlink()
        except (OSError, ValueError) as error:
            remedy = "Let all machines write into one shared folder."
            raise OutputError(str(note), expected=f"rank {rank}'s note", got=str(error), remedy=remedy) from None
        for name, states in own.items():
            if kept.setdefault(name, states) != states:
                got, remedy = f"{states} on rank {rank}, {kept[name]} before", "Let every rank run the same loop."
                raise OutputError(f"states of {name}", expected="the same on all ranks", got=got, remedy=remedy)
    return files, kept


def broken(folder: Path, manifest: Manifest, *, every: int = 1, first: int = 0) -> str | None:
    """Return the first damaged file with its error, or None, among every `every`-th file from `first` on."""
    for name in list(manifest.files)[first::every]:
        file, path = manifest.files[name], folder / name
        if path.is_symlink():
            return f"{path}: a link"
        try:
            found = file_digest(path)
        except OSError as error:
            return f"{path}: {error.strerror or error}"
        if found != file.sha256:
            return f"{path}: SHA-256 {found[:16]}..., not {file.sha256[:16]}..."
    return None


def unfit(
    folder: Path, manifest: Manifest, state: Mapping[str, Tensor], *, every: int = 1, first: int = 0
) -> str | None:
    """Return the first file without a valid `state` and the reason, or None, among the same files as `broken`."""
    layout = manifest.layout
    for rank in range(first, manifest.ranks, every):
        number = layout.entries_of(rank)
        path = folder / file_name(rank)
        try:
            with safe_open(path, "pt") as file:
                for name, tensor in state.items():
                    if name not in file.keys():  # noqa: SIM118 - no mapping
                        return f"{path}: no {name}"
                    if wrong := _wrong(file.get_slice(name), name, number, tensor.dtype):
                        return f"{path}: {name} {wrong}"
        except (OSError, SafetensorError) as error:
            return f"{path}: {error}"
    return None


def _wrong(saved: Any, name: str, number: int, dtype: torch.dtype) -> str | None:
    if saved.get_shape() != [number]:
        return f"of shape {saved.get_shape()}, not {[number]}"
    for start in range(0, number, _AT_ONCE):
        part = saved[start : start + _AT_ONCE]
        if part.dtype != dtype:
            return f"of {part.dtype}, not {dtype}"
        if wrong := wrong_numbers(name, part):
            return wrong
    return None


def wrong_numbers(name: str, numbers: Tensor) -> str | None:
    """Return the defect of a state's numbers, (entries,), or None."""
    for part in numbers.split(_AT_ONCE):
        if not len(part):
            continue
        low, high = (each.item() for each in part.aminmax())
        if math.isnan(low) or (name == MASTER_WEIGHTS and not (math.isfinite(low) and math.isfinite(high))):
            return "with a value that is not finite"
        if name in NOT_NEGATIVE and low < 0:
            return "with a negative value"
    return None


def check_files(
    transport: Transport, folder: Path, manifest: Manifest, state: Mapping[str, Tensor], *, remedy: str
) -> None:
    """Read every byte of a checkpoint, shared out over ranks; all raise OutputError if one is damaged. Collective."""
    own = {"first": transport.rank, "every": transport.world_size}
    found = broken(folder, manifest, **own) or unfit(folder, manifest, state, **own)
    error = OutputError(str(folder), expected="undamaged files", got=found or "", remedy=remedy)
    raise_together(transport, [] if found is None else [error])


def differences(manifest: Manifest, names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: str) -> list[str]:
    """Return the differences between a checkpoint's parameters and a model's trainable ones."""
    saved = {parameter.name: parameter.shape for parameter in manifest.parameters}
    expected = dict(zip(names, shapes, strict=True))
    found = [f"{name} is missing" for name in expected if name not in saved]
    found += [f"{name} is not in the model" for name in saved if name not in expected]
    found += [
        f"{name} has shape {list(saved[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in saved and saved[name] != shape
    ]
    return found + ([] if manifest.dtype == dtype else [f"all are {manifest.dtype}, not {dtype}"])


class CopiedSlice(NamedTuple):
    """Entries `source` of the file of `rank`, which become entries `target` of a shard."""

    rank: int
    source: slice
    target: slice


def moves(old: FlatLayout, new: FlatLayout, rank: int) -> Iterator[CopiedSlice]:
    """Yield the slices of files that fill the shard of `rank`; both layouts have the same parameters, in order."""
    for run in new.runs(rank):
        entry, start = run.entry, run.start
        while start < run.stop:
            owner, place, follow = old.owner(run.parameter, entry)
            size = min(follow, run.stop - start)
            yield CopiedSlice(rank=owner, source=slice(place, place + size), target=slice(start, start + size))
            entry, start = entry + size, start + size


def read_state(
    folder: Path, manifest: Manifest, layout: FlatLayout, names: Sequence[str], rank: int, state: Mapping[str, Tensor]
) -> None:
    """Fill the state of `rank` of `layout`, (entries,) each, from checked files; read only its part."""
    order = {each.name: number for number, each in enumerate(manifest.parameters)}
    saved = manifest.layout
    places = [order[name] for name in names]
    old = replace(
        saved,
        sizes=tuple(saved.sizes[place] for place in places),
        starts=tuple(saved.starts[place] for place in places),
        bucket_of=tuple(saved.bucket_of[place] for place in places),
    )
    with ExitStack() as files:
        opened: dict[int, dict[str, object]] = {}
        for move in moves(old, layout, rank):
            if move.rank not in opened:
                file = files.enter_context(safe_open(folder / file_name(move.rank), "pt"))
                opened[move.rank] = {name: file.get_slice(name) for name in state}
            for name, tensor in state.items():
                tensor[move.target] = opened[move.rank][name][move.source]  # pyright: ignore[reportIndexIssue]


def read_slices(
    transport: Transport,
    folder: Path,
    manifest: Manifest,
    parameters: Parameters,
    vectors: Sequence[str],
    *,
    remedy: str,
) -> dict[str, Tensor]:
    """Check all files; return this rank's exact weights and states `vectors`, (entries,) on the host. Collective."""
    exact = parameters.master_weights
    state = {name: torch.zeros_like(exact, device="cpu") for name in (MASTER_WEIGHTS, *vectors)}
    check_files(transport, folder, manifest, state, remedy=remedy)
    problems = list[OutputError]()
    try:
        read_state(folder, manifest, parameters.layout, parameters.names, parameters.saved.rank, state)
    except Exception as error:  # noqa: BLE001 - of a disk or a library; the other ranks wait
        got = f"{type(error).__name__}: {error}"
        problems.append(OutputError(str(folder), expected="undamaged files", got=got, remedy=remedy))
    raise_together(transport, problems)
    return state
