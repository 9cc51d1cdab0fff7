"""`lengthwise-store.json`: what a folder of prepared data is made of and from, with the digest of each file in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from lengthwise.config.problems import shown
from lengthwise.core.errors import DataError
from lengthwise.core.files import read_json

NAME = "lengthwise-store.json"
SCHEMA = "lengthwise.store/2"
AGAIN = "Delete the folder and prepare it again: lengthwise prepare (in the cache: start the run again)."

_DIGEST = "sha256"  # of all other values of the file
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_FromZero = Annotated[int, Field(ge=0)]
_Hex = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of the store: its size in bytes and its SHA-256."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    num_bytes: _FromZero
    sha256: _Hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Rows in order whose tokens are in one file: int32 ids of all of them, then, with `labels`, as many labels, then,
    with `weights`, as many float32 weights.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    file: Annotated[str, Field(pattern=r"^tokens-\d{5}\.bin$")]
    rows: _FromZero
    tokens: _FromZero
    labels: bool
    weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """Where rows came from: a file of rows called `label`, or documents, `files` of them from `first_file` on.

    `source`: the number of the source, with its settings in `Manifest.sources`. `files.jsonl` has a line a file.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    source: _FromZero
    label: str
    first_row: _FromZero
    first_file: _FromZero
    files: _FromZero
    documents: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedTokenizer:
    """What made tokens of texts; `template` is the digest of the chat template."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    digest: _Hex
    template: _Hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A store. `plan`: the digest of what was to be prepared, from what and how. `data`: of all rows (`digests`).

    `encoding`: the version of how texts become ids and labels here, beside the tokenizer. `kinds`: rows of each kind.
    `tokenizer`: None where no row is text. `largest_id` is in row `largest_id_row`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    schema: Literal["lengthwise.store/2"] = SCHEMA
    version: str
    encoding: int
    plan: _Hex
    data: _Hex
    rows: _FromZero
    tokens: _FromZero
    loss_tokens: _FromZero
    largest_id: _FromZero
    largest_id_row: _FromZero
    kinds: Mapping[str, _FromZero]
    skipped: Mapping[str, _FromZero]
    tokenizer: UsedTokenizer | None
    sources: tuple[Mapping[str, object], ...]
    origins: tuple[StoredRows, ...]
    shards: tuple[Shard, ...]
    files: Mapping[Annotated[str, Field(pattern=r"^[a-z0-9-]+\.(bin|jsonl)$")], StoredFile]

    def to_json(self) -> str:
        """Return the manifest as the text of its file, with the digest of its own values."""
        return signed(asdict(self))


_READER = TypeAdapter(Manifest)


def signed(values: Mapping[str, object]) -> str:
    """Return the text of a manifest of these values with their digest, which a change would not fit."""
    rest = {key: value for key, value in values.items() if key != _DIGEST}
    return json.dumps({**rest, _DIGEST: _digest_of(rest)}, indent=1) + "\n"


def _digest_of(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a store; DataError where it cannot be read or is none."""
    where = str(folder / NAME)
    try:
        values = read_json(folder / NAME)
        schema = values.get("schema") if isinstance(values, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"schema {shown(schema)}")
        if values.pop(_DIGEST, None) != _digest_of(values):
            raise ValueError(f"values that its {_DIGEST} is not of: it was changed")
        return _READER.validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        got = f"{place} = {shown(first['input'])}: {first['msg']}"
    except (ValueError, RecursionError) as error:
        got = f"{error}"
    raise DataError(where, expected=f"the manifest of a store, {SCHEMA}", got=got, remedy=AGAIN)
