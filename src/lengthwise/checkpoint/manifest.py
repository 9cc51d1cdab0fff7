"""`manifest.json` of a checkpoint: its step, the layout of parameters in the ranks' files, and the files' digests.

A `Manifest` describes the state of any loop; a `RunManifest` adds the values that a run resumes with.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from lengthwise.config.problems import shown
from lengthwise.core import __version__
from lengthwise.core.errors import OutputError
from lengthwise.core.files import read_json
from lengthwise.engine.flat_layout import FlatLayout
from lengthwise.engine.parameters import MASTER_WEIGHTS, Parameters
from lengthwise.engine.whole_optimizer import MEMBERS

SCHEMA = "lengthwise.checkpoint/1"
NAME = "manifest.json"

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_MOST = 2**53  # exact in float64, in which ranks share it
_Count = Annotated[int, Field(ge=1, le=_MOST)]
_FromZero = Annotated[int, Field(ge=0, le=_MOST)]
_Hex = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_ENTRY_BYTES = {"float32": 4, "float64": 8}
_DIGEST = "sha256"
_RUN = "run"  # a key of runs' manifests only
_REMEDY = "Take an earlier checkpoint: remove this folder."


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A rank's file: its size and SHA-256."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    num_bytes: _FromZero
    sha256: _Hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A trainable parameter: its first entry in the flat buffer, and its bucket."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    shape: tuple[_FromZero, ...]
    entries: _FromZero
    start: _FromZero
    bucket: _FromZero


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """An optimizer's state without its tensors.

    kind: name of its class. groups: as in torch's `state_dict`, with names in `params`, null for parameters that do not
    train. states: states of every parameter that a loss has reached, by name: a number, or null for one value an entry,
    which the ranks' files have under this name.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    kind: str
    groups: tuple[Mapping[str, Any], ...]
    states: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)

    @property
    def vectors(self) -> list[str]:
        """Names of states with one value an entry."""
        return sorted({key for kept in self.states.values() for key, number in kept.items() if number is None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The state after `step` steps.

    dtype: dtype of master weights and states. ranks: number of ranks, and of files. borders, stage_buckets,
    ranks_per_node: as in `FlatLayout`. optimizer: None in runs' checkpoints of earlier versions.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    schema: Literal["lengthwise.checkpoint/1"] = SCHEMA
    version: str
    step: _FromZero
    ranks: _Count
    dtype: Literal["float32", "float64"]
    borders: tuple[_FromZero, ...]
    ranks_per_node: _Count = 1
    stage_buckets: tuple[_Count, ...] = ()
    parameters: tuple[Parameter, ...]
    files: Mapping[str, File]
    optimizer: OptimizerState | None = None

    @property
    def layout(self) -> FlatLayout:
        """Layout of the parameters in the files."""
        return FlatLayout(
            sizes=tuple(parameter.entries for parameter in self.parameters),
            starts=tuple(parameter.start for parameter in self.parameters),
            borders=self.borders,
            bucket_of=tuple(parameter.bucket for parameter in self.parameters),
            world_size=self.ranks // max(1, len(self.stage_buckets)),
            ranks_per_node=self.ranks_per_node,
            stage_buckets=self.stage_buckets,
        )

    def contradictions(self, folder_name: str) -> Iterator[str]:
        """Yield contradictions in the fields of this kind of manifest, or with the folder's name."""
        del folder_name
        yield from ()

    def to_json(self) -> str:
        """Return the text of the file, with the digest of its values."""
        return signed(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunManifest(Manifest):
    """A checkpoint of a run after `step` steps, `skipped` of them without an update.

    run: settings that decide what is trained. data: SHA-256 of the tokens, or of remote files. position: start of the
    next step in remote data and streams (`Position` of `data/sampler.py`). first_loss, loss: losses of step 1 and of
    `step`. lines: numbers of lines in the run's files.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    step: _Count
    first_loss: float
    loss: float
    skipped: _FromZero = 0
    run: Mapping[str, object]
    data: _Hex
    lines: Mapping[str, _FromZero] = field(default_factory=dict)
    position: tuple[_FromZero, _FromZero] | tuple[_FromZero, _FromZero, str] | None = None

    def contradictions(self, folder_name: str) -> Iterator[str]:
        """Yield steps that contradict each other, or the folder's name."""
        if self.skipped > self.step:
            yield f"skipped: {self.skipped} of {self.step} steps"
        if folder_name != f"step-{self.step:06d}":
            yield f"step {shown(self.step)}, but another in the folder's name"


_Kind = TypeVar("_Kind", bound=Manifest)


def fields_of_state(parameters: Parameters, *, step: int, ranks: int, optimizer: OptimizerState) -> dict[str, Any]:
    """Return a manifest's fields for a state, without the files, which are written later."""
    saved = parameters.saved
    return {
        "version": __version__,
        "step": step,
        "ranks": ranks,
        "dtype": dtype_of(parameters),
        "borders": saved.layout.borders,
        "ranks_per_node": saved.layout.ranks_per_node,
        "stage_buckets": saved.layout.stage_buckets,
        "parameters": parameters_of(saved.layout, list(saved.names), list(saved.shapes)),
        "files": {},
        "optimizer": optimizer,
    }


def dtype_of(parameters: Parameters) -> str:
    """Return the name of the exact parameters' dtype in a manifest."""
    return str(parameters.master_weights.dtype).removeprefix("torch.")


def signed(values: Mapping[str, object]) -> str:
    """Return the text of a manifest of these values, with their digest."""
    rest = {key: value for key, value in values.items() if key != _DIGEST}
    return json.dumps({**rest, _DIGEST: _digest_of(rest)}, indent=1) + "\n"


def _digest_of(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def parameters_of(layout: FlatLayout, names: list[str], shapes: list[tuple[int, ...]]) -> tuple[Parameter, ...]:
    """Return a manifest's rows for parameters of this layout."""
    rows = zip(names, shapes, layout.sizes, layout.starts, layout.bucket_of, strict=True)
    return tuple(
        Parameter(name=name, shape=shape, entries=size, start=start, bucket=bucket)
        for name, shape, size, start, bucket in rows
    )


def read_run_manifest(folder: Path) -> RunManifest:
    """Read the manifest of a run's checkpoint; OutputError also for a session's."""
    values = _read_values(folder)
    if _RUN not in values:
        remedy, got = "Load it by Session.load, in a loop of your own.", "a session's checkpoint"
        raise OutputError(str(folder / NAME), expected="a run's checkpoint", got=got, remedy=remedy)
    return _checked(folder, values, RunManifest)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint; OutputError if it is missing or damaged."""
    values = _read_values(folder)
    return _checked(folder, values, RunManifest if _RUN in values else Manifest)


def _read_values(folder: Path) -> dict[str, Any]:
    """Return the values of a manifest after a check of its digest."""
    path = folder / NAME
    try:
        if path.is_symlink():
            raise ValueError("a link")
        values = read_json(path)
        if isinstance(values, dict) and not {_DIGEST, "schema"} & values.keys():
            got, remedy = "another program's file", "Name a folder that lengthwise has written."
            raise OutputError(str(path), expected="a checkpoint's manifest", got=got, remedy=remedy)
        if not isinstance(values, dict) or values.pop(_DIGEST, None) != _digest_of(values):
            raise ValueError(f"values that do not fit its {_DIGEST}")
    except ValueError as error:
        raise OutputError(str(path), expected="a checkpoint's manifest", got=str(error), remedy=_REMEDY) from None
    return values


def _checked(folder: Path, values: Mapping[str, Any], kind: type[_Kind]) -> _Kind:
    where = str(folder / NAME)
    try:
        found = TypeAdapter(kind).validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors()[0]
        got = f"{shown(first['input'])} at {'.'.join(map(str, first['loc'])) or 'the top'}"
        raise OutputError(where, expected="a checkpoint's manifest", got=got, remedy=_REMEDY) from None
    wrong = next(found.contradictions(folder.name), None) or next(_contradictions(found), None)
    if wrong is not None:
        raise OutputError(where, expected="a manifest without contradictions", got=wrong, remedy=_REMEDY)
    return found


def _contradictions(found: Manifest) -> Iterator[str]:
    """Yield contradictions in a manifest, which readers of its files trust."""
    if len(found.files) != found.ranks or list(found.files) != [file_name(rank) for rank in range(found.ranks)]:
        yield "other files than one per rank"
    if found.ranks % found.ranks_per_node:
        yield f"ranks_per_node: {found.ranks_per_node} of {found.ranks} ranks"
        return
    borders, stages = found.borders, found.stage_buckets
    if stages and (found.ranks % len(stages) or sum(stages) != len(borders) - 1):
        yield "impossible stages"
        return
    sharing = found.ranks // max(1, len(stages))
    if len(borders) < 2 or borders[0] != 0 or any(a > b or b % sharing for a, b in pairwise(borders)):
        yield "impossible borders"
        return
    layout, entry_bytes = found.layout, _ENTRY_BYTES[found.dtype]
    if any(file.num_bytes < layout.entries_of(rank) * entry_bytes for rank, file in enumerate(found.files.values())):
        yield "more entries in borders than in the files"
        return
    end = 0
    for parameter in found.parameters:
        start, size, bucket = parameter.start, math.prod(parameter.shape), parameter.bucket
        within = bucket + 1 < len(borders) and borders[bucket] <= start and start + size <= borders[bucket + 1]
        if parameter.entries != size or start < end or not within:
            yield f"parameter {parameter.name} at an impossible place"
            return
        end = start + size
    names = {parameter.name for parameter in found.parameters}
    if len(names) < len(found.parameters):
        yield "a parameter twice"
    if found.optimizer is not None:
        yield from _contradictions_of_optimizer(found.optimizer, names)


def _contradictions_of_optimizer(found: OptimizerState, names: set[str]) -> Iterator[str]:
    members = [group.get(MEMBERS) for group in found.groups]
    listed = [name for each in members if isinstance(each, list) for name in each]
    if not all(isinstance(each, list) for each in members) or not all(isinstance(n, str | None) for n in listed):
        yield f"groups without a list of {MEMBERS}"
    elif sorted(filter(None, listed)) != sorted(names):
        yield "groups of other parameters"
    if not found.states.keys() <= names:
        yield f"states of {shown(min(found.states.keys() - names))}, which is not a parameter"
    if MASTER_WEIGHTS in found.vectors:
        yield f"states with the name {MASTER_WEIGHTS}"


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def changed(before: Mapping[str, object], now: Mapping[str, object], prefix: str = "") -> list[str]:
    """Return the differences between the settings of two runs, as config paths with both values."""
    found = []
    for key in sorted({*before, *now}):
        old, new, path = before.get(key), now.get(key), f"{prefix}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += changed(old, new, f"{path}.")
        elif old != new:
            found.append(f"{path}: {shown(old)} then, {shown(new)} now")
    return found
