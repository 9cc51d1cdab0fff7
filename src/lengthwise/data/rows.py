"""One line of a JSON-lines file, or one row of a table, to a checked row or an error."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.core.files import unique_keys
from lengthwise.data.dataset import NO_LOSS
from lengthwise.data.messages import IMAGES, Chat, chat_of, is_like_labels, refuse_row, shown

_LARGEST_ID = 2**31 - 1
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6  # of a token: beyond these limits single-precision sums lose the other tokens
_ROWS = '{"text": ...}, {"input_ids": [...]} or {"input_ids": [...], "labels": [...]}'
_OTHER_ROWS = '{"messages": [...]} or {"prompt": ..., "completion": ...}'
# What makes a row; the first that is there
_MAIN = ("text", "input_ids", "messages", "prompt", "instruction", "conversations")
_OTHER_CHATS = ("conversation", "chat")
_PAIRS = ("chosen", "rejected")
_PIXELS = ("pixel_values", "pixel_values_videos", "input_features")
_VIDEOS = ("video", "videos", "audio", "audios", *_PIXELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """One document before tokenization: text, a Python file's bytes, a chat, a prompt with its completion, or ids.

    labels: labels of ids, None if they are the ids. weights: float32, None if all are 0 or 1. empty: the empty part of
    the row, in words, "" if none.
    """

    where: str
    text: str | None = None
    python: bytes | None = None
    chat: Chat | None = None
    pair: tuple[str, str] | None = None
    ids: np.ndarray | None = None
    labels: np.ndarray | None = None
    weights: np.ndarray | None = None
    empty: str = ""


class RowParser:
    """Parses rows; ids must be below `vocab_size`, 2^31 if None."""

    def __init__(self, vocab_size: int | None) -> None:
        self._limit = _LARGEST_ID + 1 if vocab_size is None else vocab_size
        self._constants: list[str] = []
        self._decoder = json.JSONDecoder(parse_constant=self._note_constant, object_pairs_hook=unique_keys)

    def parse(self, line: str, *, where: str) -> RawRow:
        """Parse one line, with its line end; a byte that is no UTF-8 is NUL, which no JSON has."""
        if not line.strip():
            return RawRow(where=where, empty="a blank line")
        if "\0" in line:
            got = f"another byte, at character {line.index(chr(0)) + 1}"
            raise refuse_row(where, "UTF-8", got, "Save the file as UTF-8.")
        values = self._decode(line, where)
        if not isinstance(values, dict):
            raise refuse_row(where, f"an object, {_ROWS}", f"{shown(values)}")
        row = self._row(values, where)
        if self._constants:  # checked after our columns, whose message names the position
            raise refuse_row(where, "JSON", f"{self._constants[0]}, which JSON does not have")
        return row

    def take(self, values: Mapping[str, Any], *, where: str) -> RawRow:
        """Check one row of a table."""
        return self._row(values, where)

    def _row(self, values: Mapping[str, Any], where: str) -> RawRow:
        kinds = (*_MAIN, "completion")  # a table has null where a row has no such column
        there = {name: value for name, value in values.items() if value is not None or name not in kinds}
        values = there if any(name in there for name in _MAIN) else dict(values)
        _check_columns(values, where)
        make = {"text": self._text_row, "input_ids": self._ids_row}
        return make.get(next(name for name in _MAIN if name in values), _chat_row)(values, where)

    def _decode(self, text: str, where: str) -> object:
        self._constants.clear()
        if text.startswith("\ufeff"):
            raise refuse_row(where, "JSON", "a byte order mark", "Save the file without it.")
        try:
            return self._decoder.decode(text)
        except json.JSONDecodeError as error:
            column = min(error.pos, len(text.rstrip())) + 1  # at the end of the line, not at the start of the next
            cut = "" if text.endswith("\n") else "; the file ends inside this line, is it cut off?"
            raise refuse_row(
                where, "JSON", f"broken JSON: {error.msg.removesuffix(' at')} at column {column}{cut}"
            ) from None
        except ValueError as error:  # a repeated key, or a number of thousands of digits
            raise refuse_row(where, "JSON", str(error)) from None
        except RecursionError:
            raise refuse_row(where, "JSON of a few levels", "nesting too deep to read") from None

    def _note_constant(self, name: str) -> float:
        self._constants.append(name)
        return float(name)

    def _text_row(self, values: dict[str, Any], where: str) -> RawRow:
        text = values["text"]
        if not isinstance(text, str):
            raise refuse_row(where, '"text" to be a string', shown(text))
        return RawRow(where=where, text=text, empty="" if text else 'empty "text"')

    def _ids_row(self, values: dict[str, Any], where: str) -> RawRow:
        ids = self._to_ids(values["input_ids"], "input_ids", where)
        labels, weights = self._to_ids(values["labels"], "labels", where) if "labels" in values else None, None
        if labels is not None and len(labels) != len(ids):
            raise refuse_row(where, f'"labels" as long as "input_ids", {len(ids)}', f"{len(labels)} labels")
        if values.get("weights") is not None:
            if labels is not None:
                got, remedy = "both", f"Keep labels, with {NO_LOSS} where the weight is 0."
                raise refuse_row(where, '"labels" or "weights" beside "input_ids"', got, remedy)
            labels, weights = _weighed(ids, values["weights"], where)
        return RawRow(
            where=where, ids=ids, labels=labels, weights=weights, empty="" if len(ids) else 'empty "input_ids"'
        )

    def _to_ids(self, values: object, column: str, where: str) -> np.ndarray:
        if not isinstance(values, list):
            raise refuse_row(where, f'"{column}" to be a list of whole numbers', shown(values))
        if set(map(type, values)) <= {int}:  # a bool is no int here, and no float is cast
            with contextlib.suppress(OverflowError):
                ids = np.array(values, dtype=np.int64)
                if np.all((ids >= 0) & (ids < self._limit) | (column == "labels") & (ids == NO_LOSS)):
                    return ids.astype(np.int32)
        raise self._bad_id(values, column, where)

    def _bad_id(self, values: Iterable[object], column: str, where: str) -> DataError:
        """Return the error for the first entry that is no id; slow, so called only if there is one."""
        for position, value in enumerate(values):
            whole = type(value) is int
            if whole and (0 <= value < self._limit or (column == "labels" and value == NO_LOSS)):
                continue
            extra = f", or {NO_LOSS} for no loss" if column == "labels" else ""
            expected = f"whole numbers from 0 to {self._limit - 1}{extra}" if whole else f"whole numbers{extra}"
            remedy = "Use the tokenizer of this model, or correct the row." if whole else "Correct the row."
            return refuse_row(where, expected, f"{column}[{position}] = {shown(value)}", remedy)
        raise AssertionError(f"no bad id in {column} of {where}")


def _weighed(ids: np.ndarray, weights: object, where: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return labels, int32 [length], the ids but `NO_LOSS` for weight 0, and weights, float32 [length].

    A weight belongs to the predicted token, as a label does. Weights that are all 0 or 1 become None: the labels say
    the same.
    """
    if not isinstance(weights, list):
        raise refuse_row(where, '"weights" to be a list of numbers', shown(weights))
    if len(weights) != len(ids):
        raise refuse_row(where, f'"weights" as long as "input_ids", {len(ids)}', f"{len(weights)} weights")
    right = set(map(type, weights)) <= {int, float}  # true and false are no weights
    if not right or not all(value == 0 or LEAST_WEIGHT <= value <= MOST_WEIGHT for value in weights):
        position, value = next(
            (position, value)
            for position, value in enumerate(weights)
            if type(value) not in (int, float) or not (value == 0 or LEAST_WEIGHT <= value <= MOST_WEIGHT)
        )
        expected = f"weights of 0 (no loss), or from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"
        raise refuse_row(where, expected, f"weights[{position}] = {shown(value)}")
    found = np.array(weights, dtype=np.float32)
    labels = np.where(found > 0, ids, np.int32(NO_LOSS))
    return labels, None if np.isin(found, (0, 1)).all() else found


def decode_utf8(raw: bytes, *, where: str) -> str:
    """Decode strictly; the error names the byte and its offset."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte {raw[error.start]:#04x} at byte offset {error.start}"
        raise refuse_row(where, "UTF-8", got, "Save the file as UTF-8.") from None


def _check_columns(values: dict[str, Any], where: str) -> None:
    """Require text, or input_ids with optional labels; other columns are allowed unless they look like labels."""
    if "text" in values and ("input_ids" in values or "labels" in values):
        other = "input_ids" if "input_ids" in values else "labels"
        raise refuse_row(where, _ROWS, f'"text" and "{other}" in one row', "Keep one of them.")
    _refuse_not_yet(values, where)
    if not any(name in values for name in _MAIN):
        names = ", ".join(f'"{name}"' for name in list(values)[:8]) or "no columns"
        remedy = 'Name the column "text" or "input_ids".'
        if any(name in values for name in _OTHER_CHATS):
            remedy = 'Name the column "messages", a list of {"role": ..., "content": ...}.'
        raise refuse_row(where, f"a column of {_ROWS}, {_OTHER_ROWS}", names, remedy)
    if "text" not in values and "input_ids" not in values and "messages" in values and "completion" in values:
        raise refuse_row(where, _OTHER_ROWS, '"messages" and "completion" in one row', "Keep one of them.")
    for name, value in values.items():
        if (
            (name not in ("labels", "weights") or "input_ids" not in values)
            and is_like_labels(name)
            and not _says_nothing(name, value, values)
        ):
            expected = f'"labels" with {NO_LOSS} where there is no loss, in place of other labels, masks and positions'
            got = f'"{name}", which would be ignored'
            raise refuse_row(where, expected, got, "Write it into `labels`, or take it out.")


def _refuse_not_yet(values: Mapping[str, Any], where: str) -> None:
    """Refuse columns of other trainers that are not supported.

    Beside text or ids they are allowed, unless they are images, which are read in chats alone.
    """
    own = "text" in values or "input_ids" in values
    for names, kind in (
        (() if own else _PAIRS, "preference pairs"),
        ((*_PIXELS, *IMAGES) if own else _VIDEOS, "images outside of chats, video and audio"),
    ):
        found = [name for name in names if values.get(name) not in (None, [])]
        if found:
            got, remedy = f'"{found[0]}": {kind} are not trained on yet', "Take such rows out."
            raise refuse_row(where, f"a row of {_ROWS}, {_OTHER_ROWS}", got, remedy)


def _chat_row(values: Mapping[str, Any], where: str) -> RawRow:
    if "prompt" in values and "messages" not in values and "completion" not in values:
        raise refuse_row(where, '"completion" beside "prompt"', "none", "Add it, or name the column text.")
    try:
        chat = chat_of(values, where)
    except RecursionError:
        raise refuse_row(where, "JSON of a few levels", "nesting too deep to read") from None
    if chat is not None:
        name = next(name for name in _MAIN if name in values)
        name, there = ("completion", chat.messages[chat.context :]) if name == "prompt" else (name, chat.messages)
        return RawRow(where=where, chat=chat, empty="" if there else f'empty "{name}"')
    texts = values["prompt"], values["completion"]
    for name, text in zip(("prompt", "completion"), texts, strict=True):
        if not isinstance(text, str):
            remedy = (
                "Write both as text, or both as lists of messages." if isinstance(text, list) else "Correct the row."
            )
            raise refuse_row(where, f'"{name}" to be a string', shown(text), remedy)
    return RawRow(where=where, pair=texts, empty="" if any(texts) else 'empty "prompt" and "completion"')


def _says_nothing(name: str, value: object, values: dict[str, Any]) -> bool:
    """Return whether a column that looks like labels has no effect: null, a class beside text, or the default."""
    if isinstance(value, list):
        n = len(value)
        anyway = {"attention_mask": [1] * n, "token_type_ids": [0] * n, "position_ids": [*range(n)]}
        return value == anyway.get(name)
    return value is None or ("text" in values and isinstance(value, int | float))
