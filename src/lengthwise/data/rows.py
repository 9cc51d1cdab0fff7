"""One line of a JSON-lines file to a checked row, or to an error that names what is wrong with it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.core.strict_json import unique_keys
from lengthwise.data.dataset import NO_LOSS

_LARGEST_ID = 2**31 - 1
_ROWS = '{"text": ...}, {"input_ids": [...]} or {"input_ids": [...], "labels": [...]}'
_CHATS = ("messages", "conversations", "conversation", "chat")
_CHAT_REMEDY = (
    "Chats are not read yet: render them with the tokenizer's chat template to `input_ids`, and to `labels` with "
    f"{NO_LOSS} where nothing is to be learned."
)
# What other trainers read as labels, or as what has a loss or is seen; ignored, a run would learn something else.
_WORD_BREAK = re.compile(r"(?<=[a-z])(?=[A-Z])|-")  # lossMask and loss-mask are loss_mask
_LIKE_LABELS = re.compile(r"(\w+_)?(labels?|masks?|targets?|weights?)|(label|target|position|token_type|segment)_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One document before tokenization: text, the bytes of a Python file, or ids with labels of their own or none.

    `empty` says in words what is empty about it, and is "" for a row with something in it.
    """

    where: str
    text: str | None = None
    python: bytes | None = None
    ids: np.ndarray | None = None
    labels: np.ndarray | None = None
    empty: str = ""


class RowParser:
    """Parse lines; ids have to be below `vocab_size` (None: below 2^31)."""

    def __init__(self, vocab_size: int | None) -> None:
        self._limit = _LARGEST_ID + 1 if vocab_size is None else vocab_size
        self._constants: list[str] = []
        self._decoder = json.JSONDecoder(parse_constant=self._note_constant, object_pairs_hook=unique_keys)

    def parse(self, line: bytes, *, where: str, offset: int, last: bool) -> Row:
        """Check one line; `offset` is its first byte in the file, `last` that no line end follows."""
        if not line.strip():
            return Row(where=where, empty="a blank line")
        values = self._decode(decode_utf8(line, where=where, offset=offset), where, last)
        if not isinstance(values, dict):
            raise _refuse(where, f"an object, {_ROWS}", f"{_shown(values)}")
        _check_columns(values, where)
        row = self._text_row(values, where) if "text" in values else self._ids_row(values, where)
        if self._constants:  # after the columns we read, whose message names the position
            raise _refuse(where, "JSON", f"{self._constants[0]}, which JSON does not have")
        return row

    def _decode(self, text: str, where: str, last: bool) -> object:
        self._constants.clear()
        if text.startswith("\ufeff"):
            raise _refuse(where, "JSON", "a byte order mark", "Save the file without it.")
        try:
            return self._decoder.decode(text)
        except json.JSONDecodeError as error:
            cut = "; the file ends inside this line, is it cut off?" if last else ""
            raise _refuse(where, "JSON", f"broken JSON: {error.msg} at column {error.colno}{cut}") from None
        except ValueError as error:  # a key twice, or a number of thousands of digits
            raise _refuse(where, "JSON", str(error)) from None
        except RecursionError:
            raise _refuse(where, "JSON of a few levels", "nesting too deep to read") from None

    def _note_constant(self, name: str) -> float:
        self._constants.append(name)
        return float(name)

    def _text_row(self, values: dict[str, Any], where: str) -> Row:
        text = values["text"]
        if not isinstance(text, str):
            raise _refuse(where, '"text" to be a string', _shown(text))
        return Row(where=where, text=text, empty="" if text else 'empty "text"')

    def _ids_row(self, values: dict[str, Any], where: str) -> Row:
        ids = self._to_ids(values["input_ids"], "input_ids", where)
        labels = self._to_ids(values["labels"], "labels", where) if "labels" in values else None
        if labels is not None and len(labels) != len(ids):
            raise _refuse(where, f'"labels" as long as "input_ids", {len(ids)}', f"{len(labels)} labels")
        return Row(where=where, ids=ids, labels=labels, empty="" if len(ids) else 'empty "input_ids"')

    def _to_ids(self, values: object, column: str, where: str) -> np.ndarray:
        if not isinstance(values, list):
            raise _refuse(where, f'"{column}" to be a list of whole numbers', _shown(values))
        if set(map(type, values)) <= {int}:  # a bool is no int here, and no float is cast
            with contextlib.suppress(OverflowError):
                ids = np.array(values, dtype=np.int64)
                if np.all((ids >= 0) & (ids < self._limit) | (column == "labels") & (ids == NO_LOSS)):
                    return ids.astype(np.int32)
        raise self._bad_id(values, column, where)

    def _bad_id(self, values: Iterable[object], column: str, where: str) -> DataError:
        """Name the first entry that is no id: the slow way, taken only when one is there."""
        for position, value in enumerate(values):
            whole = type(value) is int
            if whole and (0 <= value < self._limit or (column == "labels" and value == NO_LOSS)):
                continue
            extra = f", or {NO_LOSS} for no loss" if column == "labels" else ""
            expected = f"whole numbers from 0 to {self._limit - 1}{extra}" if whole else f"whole numbers{extra}"
            remedy = "Use the tokenizer of this model, or correct the row." if whole else "Correct the row."
            return _refuse(where, expected, f"{column}[{position}] = {_shown(value)}", remedy)
        raise AssertionError(f"no bad id in {column} of {where}")


def decode_utf8(raw: bytes, *, where: str, offset: int = 0) -> str:
    """Decode strictly; the error names the byte and its offset in the file."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte {raw[error.start]:#04x} at byte offset {offset + error.start}"
        raise _refuse(where, "UTF-8", got, "Save the file as UTF-8.") from None


def _check_columns(values: dict[str, Any], where: str) -> None:
    """Ask for text, or input_ids and perhaps labels; other columns are the user's own, unless they look like labels."""
    if "text" in values and ("input_ids" in values or "labels" in values):
        other = "input_ids" if "input_ids" in values else "labels"
        raise _refuse(where, _ROWS, f'"text" and "{other}" in one row', "Keep one of them.")
    if "text" not in values and "input_ids" not in values:
        names = ", ".join(f'"{name}"' for name in list(values)[:8]) or "no columns"
        remedy = _CHAT_REMEDY if any(name in values for name in _CHATS) else 'Name the column "text" or "input_ids".'
        raise _refuse(where, f"a column of {_ROWS}", names, remedy)
    for name, value in values.items():
        if (
            name != "labels"
            and _LIKE_LABELS.fullmatch(_WORD_BREAK.sub("_", name).lower())
            and not _says_nothing(name, value, values)
        ):
            expected = f'"labels" with {NO_LOSS} where there is no loss, in place of other labels, masks and positions'
            got = f'"{name}", which would be ignored'
            raise _refuse(where, expected, got, "Write it into `labels`, or take it out.")


def _says_nothing(name: str, value: object, values: dict[str, Any]) -> bool:
    """Return whether such a column changes nothing: null, a number beside text (its class), or what is so anyway."""
    if isinstance(value, list):
        n = len(value)
        anyway = {"attention_mask": [1] * n, "token_type_ids": [0] * n, "position_ids": [*range(n)]}
        return value == anyway.get(name)
    return value is None or ("text" in values and isinstance(value, int | float))


def _shown(value: object) -> str:
    """Show a value as JSON would write it, shortened; a container only by its kind, it may be large."""
    if isinstance(value, list | dict):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    shown = json.dumps(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _refuse(where: str, expected: str, got: str, remedy: str = "Correct the row.") -> DataError:
    return DataError(where, expected=expected, got=got, remedy=remedy)
