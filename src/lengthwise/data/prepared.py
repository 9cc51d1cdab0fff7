"""The description of a prepared folder: `lengthwise.json`, and the files that `datasets` reads."""

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
from lengthwise.core.files import found_at, read_json, sync

NAME, PREPARED = "lengthwise.json", "lengthwise.prepared/2"
UNFINISHED = ".unfinished"
ENCODING = 3  # raise it when the same text gets other ids or labels than before
AGAIN = "Delete the folder and prepare it again: lengthwise prepare (in the cache: start the run again)."
_BEFORE = "lengthwise-store.json"  # of versions with a file format of their own
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_FromZero = Annotated[int, Field(ge=0)]
_Hex = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedTokenizer:
    """The tokenizer of prepared rows. template: digest of its chat template."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    digest: _Hex
    template: _Hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A prepared folder.

    fingerprint: SHA-256 of sources, settings and tokenizer. data: digest of all rows (`digests`). tables: digest of
    lengths, loss tokens, loss weights and row digests. encoding: version of our code from texts to ids and labels.
    kinds: number of rows of each kind. tokenizer: None if no row is text. largest_id_row: row of `largest_id`. origins:
    first row and label of each listing. files: size of each Arrow file in bytes.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    schema: Literal["lengthwise.prepared/2"] = PREPARED
    version: str
    encoding: int
    fingerprint: _Hex
    data: _Hex
    tables: _Hex
    rows: _FromZero
    tokens: _FromZero
    loss_tokens: _FromZero
    largest_id: _FromZero
    largest_id_row: _FromZero
    kinds: Mapping[str, _FromZero]
    skipped: Mapping[str, _FromZero]
    tokenizer: UsedTokenizer | None
    sources: tuple[Mapping[str, object], ...]
    origins: tuple[tuple[_FromZero, str], ...]
    files: Mapping[Annotated[str, Field(pattern=r"^[0-9a-z_-]+\.arrow$")], _FromZero]

    def to_json(self) -> str:
        """Return the text of the description file, with a digest of the values."""
        return signed(asdict(self))


_READER = TypeAdapter(Prepared)


def signed(values: Mapping[str, object]) -> str:
    """Return these values as JSON text, with their digest."""
    rest = {key: value for key, value in values.items() if key != "sha256"}
    return json.dumps({**rest, "sha256": _digest_of(rest)}, indent=1) + "\n"


def _digest_of(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def is_prepared(path: Path) -> bool:
    """Return whether a path is prepared data, finished or not, of any version."""
    return any((path / name).is_file() for name in (NAME, _BEFORE)) or (
        path.name.endswith(UNFINISHED) and path.is_dir()
    )


def prepared_with(path: Path) -> str | None:
    """Return the tokenizer's name of a prepared folder; None if it has ids alone, or is no prepared folder."""
    if not (path / NAME).is_file():
        return None
    made = read_prepared(path).tokenizer
    return None if made is None else made.name


def read_prepared(folder: Path) -> Prepared:
    """Return the description of a prepared folder, after a check of its files' sizes."""
    path = folder / NAME
    if not path.is_file():
        if (folder / _BEFORE).is_file():
            remedy = f"Prepare it anew: lengthwise prepare SOURCES --out {folder} (delete this folder first)."
            expected = "data prepared by this version, Arrow files"
            raise DataError(str(folder), expected=expected, got=f"those of an earlier one ({_BEFORE})", remedy=remedy)
        remedy = "Finish it: give the command that was interrupted once more."
        raise DataError(str(folder), expected="prepared data", got="data that is being prepared", remedy=remedy)
    try:
        values = read_json(path)
        if not isinstance(values, dict) or values.get("schema") != PREPARED:
            raise ValueError(f"schema {shown(values.get('schema') if isinstance(values, dict) else None)}")
        if values.pop("sha256", None) != _digest_of(values):
            raise ValueError("values that its sha256 is not of: it was changed")
        found = _READER.validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        got = f"{place} = {shown(first['input'])}: {first['msg']}"
        raise refuse(path, f"a description of prepared data, {PREPARED}", got) from None
    except (ValueError, RecursionError) as error:
        raise refuse(path, f"a description of prepared data, {PREPARED}", f"{error}") from None
    for name, size in found.files.items():
        part = folder / name
        if (got := found_at(part)) != f"{size} bytes":
            raise refuse(part, f"the {size} bytes that were prepared", got)
    return found


def write_description(folder: Path, made: Prepared) -> None:
    """Write the description of a folder, last, so that a folder with a description is whole."""
    unfinished = folder / f"{NAME}.tmp"
    unfinished.write_text(made.to_json(), encoding="utf-8")
    for path in (unfinished, *(folder / name for name in made.files)):
        sync(path)
    unfinished.replace(folder / NAME)
    sync(folder)


def refuse(path: Path, expected: str, got: str, remedy: str = AGAIN) -> DataError:
    """Return the error for unusable prepared data."""
    return DataError(str(path), expected=expected, got=got, remedy=remedy)
