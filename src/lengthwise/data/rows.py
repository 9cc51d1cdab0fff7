"""One line of a JSON-lines file to a checked row, or to an error that names what is wrong with it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lengthwise.core.errors import DataError
from lengthwise.core.files import unique_keys
from lengthwise.data.dataset import NO_LOSS

_LARGEST_ID = 2**31 - 1
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6  # of a token: beyond them sums of single precision lose the other tokens
_ROWS = '{"text": ...}, {"input_ids": [...]} or {"input_ids": [...], "labels": [...]}'
_OTHER_ROWS = '{"messages": [...]} or {"prompt": ..., "completion": ...}'
_MAIN = ("text", "input_ids", "messages", "prompt")  # what makes a row; the first that is there
_CHATS = ("messages", "prompt", "completion")  # that hold messages
_OTHER_CHATS = ("conversations", "conversation", "chat")
_PAIRS = ("chosen", "rejected")
_ROLES = ("assistant", "user", "system", "developer", "tool", "function", "ipython", "environment", "observation")
_TRAINED = ("train", "training", "train_detail")  # what other trainers read in a message as what has a loss
_PIXELS = ("pixel_values", "pixel_values_videos", "input_features")
_IMAGES = ("image", "images", "video", "videos", "audio", "audios", *_PIXELS)
# What other trainers read as labels, or as what has a loss or is seen; ignored, a run would learn something else.
_WORD_BREAK = re.compile(r"(?<=[a-z])(?=[A-Z])|-")  # lossMask and loss-mask are loss_mask
_LIKE_LABELS = re.compile(r"(\w+_)?(labels?|masks?|targets?|weights?)|(label|target|position|token_type|segment)_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One document before tokenization: text, the bytes of a Python file, a chat, a prompt with its completion, or ids
    with labels of their own or none, and weights, float32, where some are neither 0 nor 1.

    `context` counts the messages at the start of a chat that have no loss: the prompt of a completion.
    `empty` says in words what is empty about it, and is "" for a row with something in it.
    """

    where: str
    text: str | None = None
    python: bytes | None = None
    chat: tuple[Mapping[str, Any], ...] | None = None
    tools: Sequence[Any] | None = None
    context: int = 0
    pair: tuple[str, str] | None = None
    ids: np.ndarray | None = None
    labels: np.ndarray | None = None
    weights: np.ndarray | None = None
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
        row = self._row(values, where)
        if self._constants:  # after the columns we read, whose message names the position
            raise _refuse(where, "JSON", f"{self._constants[0]}, which JSON does not have")
        return row

    def take(self, values: Mapping[str, Any], *, where: str) -> Row:
        """Check one row of a table. There null is how a column is absent, so other rows' columns are left out.

        So are entries of other rows within tools, and within the calls of a message: a template would write the null.
        """
        there = {name: value for name, value in values.items() if value is not None or name not in _MAIN}
        there |= {name: _without_nulls(there[name]) for name in ("tools", *_CHATS) if isinstance(there.get(name), list)}
        return self._row(there if any(name in there for name in _MAIN) else dict(values), where)

    def _row(self, values: dict[str, Any], where: str) -> Row:
        _check_columns(values, where)
        make = {"text": self._text_row, "input_ids": self._ids_row, "messages": _chat_row, "prompt": _pair_row}
        return next(make[name] for name in _MAIN if name in values)(values, where)

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
        labels, weights = self._to_ids(values["labels"], "labels", where) if "labels" in values else None, None
        if labels is not None and len(labels) != len(ids):
            raise _refuse(where, f'"labels" as long as "input_ids", {len(ids)}', f"{len(labels)} labels")
        if values.get("weights") is not None:
            if labels is not None:
                got, remedy = "both", f"Keep labels, with {NO_LOSS} where the weight is 0."
                raise _refuse(where, '"labels" or "weights" beside "input_ids"', got, remedy)
            labels, weights = _weighed(ids, values["weights"], where)
        return Row(where=where, ids=ids, labels=labels, weights=weights, empty="" if len(ids) else 'empty "input_ids"')

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


def _weighed(ids: np.ndarray, weights: object, where: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return labels, int32 [length]: the ids, `NO_LOSS` where the weight is 0, and the weights, float32 [length].

    A weight is of the token that is predicted, as a label is. No weights are returned where all are 0 or 1: the labels
    say the same.
    """
    if not isinstance(weights, list):
        raise _refuse(where, '"weights" to be a list of numbers', _shown(weights))
    if len(weights) != len(ids):
        raise _refuse(where, f'"weights" as long as "input_ids", {len(ids)}', f"{len(weights)} weights")
    right = set(map(type, weights)) <= {int, float}  # true and false are none
    if not right or not all(value == 0 or LEAST_WEIGHT <= value <= MOST_WEIGHT for value in weights):
        position, value = next(
            (position, value)
            for position, value in enumerate(weights)
            if type(value) not in (int, float) or not (value == 0 or LEAST_WEIGHT <= value <= MOST_WEIGHT)
        )
        expected = f"weights of 0 (no loss), or from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"
        raise _refuse(where, expected, f"weights[{position}] = {_shown(value)}")
    found = np.array(weights, dtype=np.float32)
    labels = np.where(found > 0, ids, np.int32(NO_LOSS))
    return labels, None if np.isin(found, (0, 1)).all() else found


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
    _refuse_not_yet(values, where)
    if not any(name in values for name in _MAIN):
        names = ", ".join(f'"{name}"' for name in list(values)[:8]) or "no columns"
        remedy = 'Name the column "text" or "input_ids".'
        if any(name in values for name in _OTHER_CHATS):
            remedy = 'Name the column "messages", a list of {"role": ..., "content": ...}.'
        if "instruction" in values and "output" in values:
            remedy = 'Write "prompt", of the instruction and its input, and "completion", the output.'
        raise _refuse(where, f"a column of {_ROWS}, {_OTHER_ROWS}", names, remedy)
    if "text" not in values and "input_ids" not in values and "messages" in values and "completion" in values:
        raise _refuse(where, _OTHER_ROWS, '"messages" and "completion" in one row', "Keep one of them.")
    for name, value in values.items():
        if (
            (name not in ("labels", "weights") or "input_ids" not in values)
            and _is_like_labels(name)
            and not _says_nothing(name, value, values)
        ):
            expected = f'"labels" with {NO_LOSS} where there is no loss, in place of other labels, masks and positions'
            got = f'"{name}", which would be ignored'
            raise _refuse(where, expected, got, "Write it into `labels`, or take it out.")


def _refuse_not_yet(values: Mapping[str, Any], where: str) -> None:
    """Name what is known of other trainers and is not trained on yet; beside text or ids it is the user's own, unless
    it is what a processor of images makes.
    """
    own = "text" in values or "input_ids" in values
    for names, kind in (
        (() if own else _PAIRS, "preference pairs"),
        (_PIXELS if own else _IMAGES, "images, video and audio"),
    ):
        found = [name for name in names if values.get(name) is not None]
        if found:
            got, remedy = f'"{found[0]}": {kind} are not trained on yet', "Take such rows out."
            raise _refuse(where, f"a row of {_ROWS}, {_OTHER_ROWS}", got, remedy)


def _chat_row(values: Mapping[str, Any], where: str) -> Row:
    messages, tools = values["messages"], values.get("tools")
    if not isinstance(messages, list):
        raise _refuse(where, '"messages" to be a list', _shown(messages))
    if tools is not None and not isinstance(tools, list):
        raise _refuse(where, '"tools" to be a list', _shown(tools))
    chat = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            expected = f'messages[{number}] to be an object with a "role"'
            raise _refuse(where, expected, _shown(message))
        content, role = message.get("content"), message["role"]
        if role not in _ROLES:
            remedy = "Rename it; a turn of the model has the role assistant."
            raise _refuse(where, f"a role of {', '.join(_ROLES)}", f"{_shown(role)} of messages[{number}]", remedy)
        marks = [name for name in message if _is_like_labels(name) and message[name] is not None]
        marks += [name for name in _TRAINED if message.get(name) not in (None, role == "assistant")]
        if marks:
            got = f'"{marks[0]}" of messages[{number}], which would be ignored'
            raise _refuse(where, "a loss on all turns of the assistant and no other", got, "Take it out.")
        if isinstance(content, list):
            got = f"messages[{number}] with a list: images, video and audio are not trained on yet"
            raise _refuse(where, '"content" to be text', got, "Write text, or take the row out.")
        if content is not None and not isinstance(content, str):
            raise _refuse(where, f'"content" of messages[{number}] to be text', _shown(content))
        chat.append({name: value for name, value in message.items() if value is not None or name == "content"})
    return Row(where=where, chat=tuple(chat), tools=tools, empty="" if chat else 'empty "messages"')


def _pair_row(values: Mapping[str, Any], where: str) -> Row:
    if "completion" not in values:
        raise _refuse(where, '"completion" beside "prompt"', "none", "Add it, or name the column text.")
    texts = values["prompt"], values["completion"]
    if all(isinstance(text, list) for text in texts):
        chat = _chat_row({**values, "messages": [*texts[0], *texts[1]]}, where)
        return replace(chat, context=len(texts[0]), empty="" if texts[1] else 'empty "completion"')
    for name, text in zip(("prompt", "completion"), texts, strict=True):
        if not isinstance(text, str):
            remedy = (
                "Write both as text, or both as lists of messages." if isinstance(text, list) else "Correct the row."
            )
            raise _refuse(where, f'"{name}" to be a string', _shown(text), remedy)
    return Row(where=where, pair=texts, empty="" if any(texts) else 'empty "prompt" and "completion"')


def _without_nulls(values: Any) -> Any:
    """Return lists and objects without the entries of objects that are null, but for a message's content."""
    if isinstance(values, list):
        return [_without_nulls(each) for each in values]
    if isinstance(values, dict):
        return {name: _without_nulls(value) for name, value in values.items() if value is not None or name == "content"}
    return values


def _is_like_labels(name: str) -> bool:
    return _LIKE_LABELS.fullmatch(_WORD_BREAK.sub("_", name).lower()) is not None


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
    shown = json.dumps(value, default=repr)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _refuse(where: str, expected: str, got: str, remedy: str = "Correct the row.") -> DataError:
    return DataError(where, expected=expected, got=got, remedy=remedy)
