"""A session's state as a folder of slices: each rank writes its slice, and reads its slice of any ranks' files.

No rank has more than its slices in host memory, whether it writes or reads. A state is checked whole before anything
changes, and all ranks raise one rank's error.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from lengthwise.checkpoint import (
    Ended,
    Manifest,
    OptimizerState,
    SliceWriter,
    check_sizes,
    differences,
    dtype_of,
    read_manifest,
    read_slices,
    read_whole,
    state_of,
    take_state,
)
from lengthwise.checkpoint.manifest import NAME
from lengthwise.comm import Transport, agree, from_first, on_first_rank, raise_together
from lengthwise.core.errors import Collector, LengthwiseError, OutputError, raise_problems
from lengthwise.core.files import claim, previous_of
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.engine.parameters import MASTER_WEIGHTS
from lengthwise.engine.whole_optimizer import MEMBERS, kept_of
from lengthwise.session.misuse import is_number, shown

_SHOWN = 8  # differences
_ANOTHER = "Take another checkpoint: remove this folder."
_SHARED = "Give a folder on a disk that all machines share, by the same path on all ranks."


def _problems_of(optimizer: SlicedOptimizer, state: OptimizerState | None) -> Iterator[tuple[str, str, str]]:
    """Yield (where, expected, got) for each way in which a saved optimizer differs from this one."""
    if state is None:
        yield "its optimizer", "groups and states by parameter", "those of a run of an earlier version"
        return
    here = state_of(optimizer)
    if state.kind != here.kind:
        yield "its optimizer", here.kind, state.kind
        return
    members = [[sorted(filter(None, group[MEMBERS])) for group in each.groups] for each in (here, state)]
    if members[0] != members[1]:
        counts = [f"{len(each)} of {', '.join(str(len(one)) for one in each)} parameters" for each in members]
        got = counts[1] if counts[0] != counts[1] else f"{counts[1]}, which are others"
        yield "its optimizer's groups", counts[0], got
        return
    for number, (group, given) in enumerate(zip(here.groups, state.groups, strict=True)):
        for key, expected in _wrong_arguments(group, given):
            yield f"its optimizer's groups, {number}, {key}", expected, shown(given.get(key))
        kept = kept_of(optimizer.optimizer, {**group, **given})
        for name in given[MEMBERS]:
            found = state.states.get(name)
            if found:
                yield from _wrong_kept(name, found, kept)
    for name in state.states.keys() - optimizer.shapes.keys():
        yield f"states of {name}", "none", ", ".join(state.states[name])


def _wrong_kept(
    name: str, found: Mapping[str, float | None], kept: Mapping[str, bool] | None
) -> Iterator[tuple[str, str, str]]:
    """Yield (where, expected, got) for each wrong state of a parameter. kept: result of `kept_of`."""
    own = {key: number is None for key, number in found.items()}
    if kept is not None and own != dict(kept):
        yield f"states of {name}", ", ".join(sorted(kept)) or "none", ", ".join(sorted(own))
    for key, number in found.items():
        if number is not None and (expected := _wrong_number(key, number)):
            yield f"states of {name}, {key}", expected, shown(number)


def _wrong_arguments(own: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a saved group that do not fit the optimizer's own group, and what was expected."""
    for key, value in own.items():
        if key == MEMBERS:
            continue
        if isinstance(value, tuple | list) and all(map(is_number, value)):  # names are torch's `param_names`
            each = given.get(key)
            if not isinstance(each, tuple | list) or len(each) != len(value) or not all(map(_is_positive, each)):
                yield key, f"{len(value)} numbers of 0 or more"
        elif is_number(value) and not _is_positive(given.get(key)):
            yield key, "a finite number of 0 or more"
    for key, value in given.items():
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        try:
            json.dumps(plain)
        except (TypeError, ValueError):
            yield key, "a number, a word, or several"


def _is_positive(value: object) -> bool:
    return is_number(value) and 0 <= float(value) < math.inf  # type: ignore[arg-type] - it is a number


def _wrong_number(key: str, value: object) -> str | None:
    """Return what was expected of a number in an optimizer's state, or None if the number is possible."""
    number = float(value) if is_number(value) else math.nan  # type: ignore[arg-type] - it is a number
    if math.isfinite(number) and (key != "step" or (number >= 0 and number.is_integer())):
        return None
    return "a whole number of 0 or more" if key == "step" else "a finite number"


_CLAIMED: dict[Path, tuple[TextIO, int]] = {}  # locks of this process, and how many of its sessions have each


class Claims:
    """The folder that a session saved last: other processes are refused there until it saves elsewhere, or ends."""

    def __init__(self) -> None:
        self._own: Path | None = None

    def add(self, folder: Path) -> None:
        """Claim a folder by a lock on a file beside it, in place of the one before.

        Raises:
            OSError: the lock cannot be made.
            OutputError: another process writes there.
        """
        if folder != self._own:
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock, users = _CLAIMED.get(folder) or (claim(_lock_of(folder), what=str(folder)), 0)
            _CLAIMED[folder] = lock, users + 1
            self.release()
            self._own = folder

    def release(self) -> None:
        """Let other processes write there."""
        if self._own is None:
            return
        lock, users = _CLAIMED.pop(self._own)
        if users > 1:
            _CLAIMED[self._own] = lock, users - 1
        else:
            _lock_of(self._own).unlink(missing_ok=True)
            lock.close()
        self._own = None


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def save(
    writer: SliceWriter, updates: SlicedOptimizer, folder: Path, step: int, *, claims: Claims, background: bool
) -> None:
    """Write the state after `step` into a folder, the same on all ranks. Collective.

    Raises:
        OutputError: a rank cannot write, which with `background` is a warning at a later step's end; or another process
            writes there.
        ConfigError: an argument of the optimizer's groups cannot be written.
    """
    updates.take_changes()
    writer.finish()  # before another folder is claimed in place of the one that it may still write
    on_first_rank(writer.transport, lambda: (_refuse_other(folder), claims.add(folder)))
    found = list[Ended]()
    writer.save(folder, step, updates, lambda state: Manifest(**state), ended=_warn if background else found.append)
    if not background:
        writer.finish()
        if found[0].error is not None:
            remedy = "Free or repair the disk; an earlier checkpoint there was not changed."
            raise OutputError(str(folder), expected="a folder that can be written", got=found[0].error, remedy=remedy)


def load(transport: Transport, updates: SlicedOptimizer, path: Path) -> int | None:
    """Load the state of a folder, or of a plain loop's file; return its steps, None if it has none. Collective.

    Raises:
        OutputError, Problems: a file is damaged, or of another model or optimizer; on all ranks, and nothing changed.
    """
    transport.phase = f"reading {path}"
    is_file = from_first(transport, lambda: os.path.isfile(path))
    steps, optimizer, state = (_read_file if is_file else _read_folder)(transport, updates, path)
    weights = state.pop(MASTER_WEIGHTS, None)
    take_state(updates, optimizer, state)
    if weights is not None:
        updates.parameters.master_weights.copy_(weights)
        updates.publish()
    return steps


_Read = tuple[int | None, OptimizerState, dict[str, Tensor]]  # steps; and (entries,) of this rank, by state


def _read_file(transport: Transport, updates: SlicedOptimizer, path: Path) -> _Read:
    """Read this rank's slices of a plain loop's state. Collective."""

    def check(state: OptimizerState) -> None:
        raise_problems(_refused(updates, state, path))

    found = Collector()
    read = found.attempt(lambda: read_whole(path, updates, check))
    raise_together(transport, found.problems)
    assert read is not None, "else there are problems"
    steps, optimizer, state = read
    agree(transport, json.dumps([steps, asdict(optimizer), sorted(state)]).encode(), f"state in {path}", _SHARED)
    return read


def _read_folder(transport: Transport, updates: SlicedOptimizer, folder: Path) -> _Read:
    """Read this rank's slices of a folder. Collective."""
    on_first_rank(transport, lambda: _put_back(folder))
    manifest, problems = _read_manifest(transport, updates, folder)
    raise_together(transport, problems)
    assert manifest is not None, "else there are problems"
    assert manifest.optimizer is not None, "else there are problems"
    agree(transport, manifest.to_json().encode(), f"{NAME} in {folder}", _SHARED)
    vectors = manifest.optimizer.vectors
    state = read_slices(transport, folder, manifest, updates.parameters, vectors, remedy=_ANOTHER)
    return manifest.step, manifest.optimizer, state


def _read_manifest(
    transport: Transport, updates: SlicedOptimizer, folder: Path
) -> tuple[Manifest | None, list[LengthwiseError]]:
    """Return the manifest of a folder as this rank reads it, and its problems."""
    if not folder.is_dir() or not (folder / NAME).is_file():
        where = f"rank {transport.rank}, {folder}"
        remedy = "Name a folder that Session.save has written." if transport.rank == 0 else _SHARED
        got = f"no {NAME} in it" if folder.is_dir() else "no such folder"
        return None, [OutputError(where, expected="a checkpoint", got=got, remedy=remedy)]
    try:
        manifest = read_manifest(folder)
        if transport.rank == 0:
            check_sizes(folder, manifest)
    except LengthwiseError as error:
        return None, [error]
    saved = updates.parameters.saved
    wrong = differences(manifest, saved.names, saved.shapes, dtype_of(updates.parameters))
    if wrong:
        got = "; ".join(wrong[:_SHOWN]) + (f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")
        remedy = "Give the session the model that was saved, in the same precision."
        return None, [OutputError(str(folder), expected="the session's parameters", got=got, remedy=remedy)]
    return manifest, _refused(updates, manifest.optimizer, folder)


def _refused(updates: SlicedOptimizer, state: OptimizerState | None, path: Path) -> list[LengthwiseError]:
    remedy = "Give the session an optimizer of the same class, groups and arguments."
    wrong = islice(_problems_of(updates, state), _SHOWN)
    return [OutputError(f"{path}, {what}", expected=each, got=got, remedy=remedy) for what, each, got in wrong]


def _refuse_other(folder: Path) -> None:
    """Refuse to write over anything but a checkpoint or an empty folder."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        read_manifest(folder)  # checks its digest: other programs write a manifest.json too
    except LengthwiseError:
        remedy = "Name a new folder, or remove this one."
        expected = "a new folder, or a checkpoint to replace"
        raise OutputError(str(folder), expected=expected, got="other files", remedy=remedy) from None


def _put_back(folder: Path) -> None:
    """Restore the earlier checkpoint if a save was interrupted between its two renames."""
    if not folder.exists() and (previous_of(folder) / NAME).is_file():
        previous_of(folder).rename(folder)


def _warn(ended: Ended) -> None:
    if ended.error is not None:
        text = f"lengthwise: checkpoint {ended.path} of step {ended.step} was not written: {ended.error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def warn_of_left(under_way: Sequence[tuple[Path, int]]) -> None:
    """Warn of checkpoints written in the background that were not whole when their session ended without `close`."""
    for folder, step in under_way:
        text = f"lengthwise: checkpoint {folder} of step {step} was not written: its session was not closed"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
