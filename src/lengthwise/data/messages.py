"""Chats of every form as messages: `messages`, prompt and completion, ShareGPT's `conversations`, Alpaca's columns.

Lines and tables follow one rule: null means absent, because a table has null where other rows have an entry. A message
without content has the empty text, because templates write null as the word None. JSON text (of `tools`, of
`arguments`) keeps its nulls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lengthwise.core.errors import DataError
from lengthwise.core.files import unique_keys
from lengthwise.core.names import counted
from lengthwise.data.image_store import image_within, keep_image

REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message's reasoning
_SHARE_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}  # of ShareGPT; others are ours
_ROLES = ("assistant", "user", "system", "developer", "tool", "function", "ipython", "environment", "observation")
_TRAINED = ("train", "training", "train_detail")  # keys by which other trainers mark messages with a loss
_SYSTEM = ("system", "system_prompt")
_TEMPLATE_VALUES = ("documents", "chat_template_kwargs")
BESIDE = (*_SYSTEM, "history", "tools", "functions", *_TEMPLATE_VALUES)
"""Columns that other trainers put into the prompt: beside a chat each is used, or refused by name."""
_INSTEAD = {  # of columns that no chat takes
    "functions": "Write them into `tools`, a list of objects with type and function, or take the column out.",
    "history": "Write its turns into the messages, or take the column out.",
}
# What `apply_chat_template` has for itself; a row's values for it would change more than the text of the prompt.
_RESERVED = ("messages", "conversation", "conversations", "tools", "chat_template", "add_generation_prompt")
_RESERVED += ("continue_final_message", "return_assistant_tokens_mask", "tokenize", "return_dict", "padding")
_TEXT_PARTS = ("text", "input_text", "output_text")
IMAGES = ("images", "image")
"""Columns of the images of a chat, whose parts `{"type": "image"}` take them in order."""
_PATHS = ("image", "path", "url", "image_url")  # keys of a part that has its own
_NO_FILE = re.compile(r"(https?|data|s3|gs|hf|ftp):", re.IGNORECASE)
_MARK = "<image>"  # of other trainers, for an image in a text
_MEDIA = re.compile(r"(input_)?(image|video|audio)(_url|_pad)?")
_WORD_BREAK = re.compile(r"(?<=[a-z])(?=[A-Z])|-")  # lossMask and loss-mask are loss_mask
# What other trainers read as labels, or as what has a loss or is seen; ignored, a run would learn something else.
_LIKE_LABELS = re.compile(r"(\w+_)?(labels?|masks?|targets?|weights?)|(label|target|position|token_type|segment)_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """The messages and tools that a template gets: `arguments` of calls are objects, `content` is text.

    In messages with images it is parts, text and `{"type": "image"}`. context: number of messages at the start without
    a loss, the prompt of a completion. values: further names that the template sees, `documents` and the entries of
    `chat_template_kwargs`. images: paths, as in the row, in the order of the messages.
    """

    where: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Any, ...] | None = None
    context: int = 0
    values: Mapping[str, Any]
    images: tuple[str, ...] = ()


def chat_of(values: Mapping[str, Any], where: str) -> Chat | None:
    """Return the chat of a row with `messages`, `prompt`, `instruction` or `conversations`, or None for two texts.

    Raises DataError for anything else, and for a column of `BESIDE` that the chat cannot take.
    """
    values = {name: value for name, value in values.items() if name not in BESIDE or not is_nothing(value)}
    context, history = 0, list[Any]()
    if "messages" in values:
        turns = _listed(values["messages"], "messages", where)
    elif "prompt" in values:
        texts = values["prompt"], values["completion"]
        if not all(isinstance(text, list) for text in texts):
            beside = [name for name in (*BESIDE, *IMAGES) if values.get(name) is not None]
            _refuse_ignored(beside, "prompt and completion of text", where)
            return None
        turns, context = [*texts[0], *texts[1]], len(texts[0])
    elif "instruction" in values and "output" in values:
        turns, history = _alpaca(values, where), ["history"]
    elif "conversations" not in values:
        raise refuse_row(where, '"output" beside "instruction"', "none", "Add it, or name the columns otherwise.")
    else:
        turns = [_of_share(each) for each in _listed(values["conversations"], "conversations", where)]
    _refuse_ignored([name for name in _INSTEAD if name in values and name not in history], "a chat", where)
    system = _system(values, turns, where)
    messages = [_message(each, number, where) for number, each in enumerate([*system, *turns], start=-len(system))]
    messages, images = _with_images(messages, values, where)
    for number, message in enumerate(messages[len(system) + context :], start=context):
        said = [
            text_of(message).strip(),
            message["content"] != text_of(message),
            message.get("tool_calls"),
            *(message.get(name) for name in REASONING),
        ]
        if message["role"] == "assistant" and not any(said):
            expected = "an assistant's message with content, reasoning or tool_calls"
            got = 'an empty "output"' if history and number + 1 == len(turns) else f"messages[{number}] with none"
            remedy = "Write what it says, take it out, or {skip_bad|set `bad_rows: skip`} to leave such rows out."
            raise refuse_row(where, expected, got, remedy)
    tools = values.get("tools")
    tools = tuple(_parsed(tools, list, "tools", where)) or None if tools is not None else None
    context += len(system) * (context > 0)
    own = _template_values(values, where)
    return Chat(where=where, messages=messages, tools=tools, context=context, values=own, images=images)


def is_nothing(value: Any) -> bool:
    """Return whether a column of `BESIDE` is null, empty, or an object of nulls."""
    return value is None or (isinstance(value, str | list | dict) and (not value or not _without_nulls(value)))


def _listed(value: Any, name: str, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise refuse_row(where, f'"{name}" to be a list', shown(value))
    return value


def _refuse_ignored(names: Sequence[str], kind: str, where: str) -> None:
    if names:
        remedy = _INSTEAD.get(names[0], "Write it into the prompt, or take the column out.")
        raise refuse_row(where, f"{kind} with all of its prompt", f'"{names[0]}", which would be ignored', remedy)


def _alpaca(values: Mapping[str, Any], where: str) -> list[Any]:
    """Return the turns of Alpaca's columns, after those of `history`: pairs of (user's text, model's text)."""
    names = ("instruction", "input", "output")
    instruction, more, output = (values.get(name) or "" for name in names)
    if not all(isinstance(each, str) for each in (instruction, more, output)):
        kinds = ", ".join(f'"{name}": {shown(values[name])}' for name in names if name in values)
        raise refuse_row(where, '"instruction", "input", "output" to be text', kinds)
    pairs = values.get("history", [])
    right = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    if not right or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise refuse_row(where, '"history" to be a list of pairs of texts', shown(pairs))
    question = "\n\n".join(filter(None, (instruction, more)))
    texts = [*(text for pair in pairs for text in pair), question, output]
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def _of_share(turn: Any) -> Any:
    """Return a turn of ShareGPT as a message; return anything else unchanged, to be checked as a message."""
    if not isinstance(turn, dict) or turn.get("from") is None or turn.get("role") is not None:
        return turn
    role = turn["from"]
    others = {name: value for name, value in turn.items() if name not in ("from", "value", "role")}
    role = _SHARE_ROLES.get(role, role) if isinstance(role, str) else role
    content = turn.get("value")
    return {**others, "role": role, "content": others.get("content") if content is None else content}


def _system(values: Mapping[str, Any], turns: Sequence[Any], where: str) -> list[Any]:
    """Return the message of a system prompt beside a chat, unless the chat begins with the same."""
    found = {name: values[name] for name in _SYSTEM if name in values}
    for name, text in found.items():
        if not isinstance(text, str):
            raise refuse_row(where, f'"{name}" to be text', shown(text))
    first = turns[0] if turns and isinstance(turns[0], dict) else {}
    theirs = (
        [text_of({"content": _content(first.get("content"), 0, where)})]
        if first.get("role") in ("system", "developer")
        else []
    )
    if len({*found.values(), *theirs}) > 1:
        got = f'"{next(iter(found))}" beside {"another in its messages" if theirs else "another column of it"}'
        raise refuse_row(where, "one system prompt", got, "Keep one of them.")
    texts = [] if theirs or not turns else list(found.values())[:1]
    return [{"role": "system", "content": text} for text in texts]


def _message(message: Any, number: int, where: str) -> Mapping[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise refuse_row(where, f'messages[{number}] to be an object with a "role"', shown(message))
    role = message["role"]
    if role not in _ROLES:
        remedy = "Rename it; a turn of the model has the role assistant."
        raise refuse_row(where, f"a role of {', '.join(_ROLES)}", f"{shown(role)} of messages[{number}]", remedy)
    marks = [name for name in message if is_like_labels(name) and message[name] is not None]
    marks += [name for name in _TRAINED if message.get(name) not in (None, role == "assistant")]
    if marks:
        got = f'"{marks[0]}" of messages[{number}], which would be ignored'
        raise refuse_row(where, "a loss on all turns of the assistant and no other", got, "Take it out.")
    found = {name: _without_nulls(value) for name, value in message.items() if value is not None}
    found["content"] = _content(message.get("content"), number, where)
    calls = _parsed(found.pop("tool_calls", []), list, f'"tool_calls" of messages[{number}]', where)
    return {**found, "tool_calls": [_call(each, number, where) for each in calls]} if calls else found


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message in any form."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _content(content: Any, number: int, where: str) -> str | list[dict[str, Any]]:
    """Return a message's content: its text parts joined, or its parts if some are images."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise refuse_row(where, f'"content" of messages[{number}] to be text', shown(content))
    parts = list[dict[str, Any]]()
    for place, part in enumerate(content):
        at = f"messages[{number}].content[{place}]"
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type") if isinstance(part, dict) else "text"
        kind = "text" if kind is None and isinstance(text, str) else kind
        media = _MEDIA.fullmatch(kind) if isinstance(kind, str) else None
        if media and media[2] == "image" and isinstance(part, dict):
            given = next((part[name] for name in _PATHS if part.get(name) is not None), None)
            parts.append({"type": "image", "path": None if given is None else _path(given, at, where)})
            continue
        if media:
            got = f"{at} of type {shown(kind)}: {media[2]} is not trained on yet"
            raise refuse_row(where, '"content" of text and images', got, "Write text, or take the row out.")
        if kind not in _TEXT_PARTS or not isinstance(text, str | None):
            got = f"{at} of type {shown(kind)}" if kind not in _TEXT_PARTS else f"{at} with {shown(text)}"
            raise refuse_row(where, '"content" of text', got, "Write it as text, or take the row out.")
        parts.append({"type": "text", "text": text or ""})
    return parts if any(part["type"] == "image" for part in parts) else text_of({"content": parts})


def _path(given: Any, at: str, where: str) -> str:
    """Return the path of an image, from a path, an object with one, or the image itself, which is written to a file."""
    given = given.get("url") if isinstance(given, dict) and given.get("url") is not None else given
    try:
        if (content := image_within(given)) is not None:
            return keep_image(content)
    except ValueError as error:
        raise refuse_row(where, "an image", f"{at}: {error}", "Write it to a file, and its path here.") from None
    if isinstance(given, dict) and given.get("bytes") is None:
        given = given.get("path") or given.get("url")
    if not isinstance(given, str) or not given or _NO_FILE.match(given):
        got = f"{at} with {shown(given)}"
        remedy = "Write the image to a file, and its path, relative to the file of the row."
        raise refuse_row(where, "images as paths of files", got, remedy)
    return given.removeprefix("file://")


def _with_images(
    messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any], where: str
) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """Return messages, and the paths of their images: those of parts, or of the columns, in order.

    If no message has a part for images, those of the columns come before the text of the first user, as in TRL.
    """
    columns = [name for name in IMAGES if values.get(name) is not None]
    if len(columns) > 1:
        raise refuse_row(where, "one column of images", " and ".join(f'"{name}"' for name in columns), "Join them.")
    column = values[columns[0]] if columns else None
    given = [] if column is None else column if isinstance(column, list) else [column]
    paths = [_path(each, f'"images"[{place}]', where) for place, each in enumerate(given)]
    found = [dict(each) for each in messages]
    first = next((each for each in found if each["role"] == "user"), None)
    if paths and first is not None and all(isinstance(each["content"], str) for each in found):
        if any(_MARK in each["content"] for each in found):
            remedy = 'Write each as a part, {"type": "image"}.'
            raise refuse_row(where, f'no "{_MARK}" in texts beside images', f'"{_MARK}"', remedy)
        text = {"type": "text", "text": first["content"]}
        first["content"] = [*({"type": "image", "path": None} for _ in paths), text]
    parts = [part for each in found if isinstance(each["content"], list) for part in each["content"]]
    places = [part for part in parts if part["type"] == "image"]
    open_places = [part for part in places if part["path"] is None]
    if len(open_places) != len(paths):
        got = f"{counted(len(open_places), 'part')} of type image without a path, and {counted(len(paths), 'path')}"
        raise refuse_row(where, 'a path in "images" for each part of type image without one', got)
    for part, path in zip(open_places, paths, strict=True):
        part["path"] = path
    return tuple(found), tuple(part.pop("path") for part in places)


def _call(call: Any, number: int, where: str) -> Any:
    """Return a tool call with its arguments as an object; null arguments become {}."""
    if not isinstance(call, dict):
        raise refuse_row(where, f'"tool_calls" of messages[{number}] to be objects', shown(call))
    holder = call["function"] if isinstance(call.get("function"), dict) else call
    name = f'"arguments" of a call of messages[{number}]'
    holder = {**holder, "arguments": _parsed(holder.get("arguments") or {}, dict, name, where)}
    return {**call, "function": holder} if isinstance(call.get("function"), dict) else holder


def _parsed(value: Any, kind: type[Any], name: str, where: str) -> Any:
    """Return a list or an object: JSON text parsed as it is written, other values without nulls."""
    noun = "a list" if kind is list else "an object"
    name = name if name.startswith('"') else f'"{name}"'
    if isinstance(value, str):
        try:
            found = json.loads(value, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, kind):
            raise refuse_row(where, f"{name} to be {noun}, or JSON text of one", f"the text {shown(value)}")
        return found
    if not isinstance(value, kind):
        raise refuse_row(where, f"{name} to be {noun}", shown(value))
    return _without_nulls(value)


def _template_values(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the names that the template sees: `documents`, and the entries of `chat_template_kwargs`."""
    found = dict[str, Any]()
    if "chat_template_kwargs" in values:
        found = _parsed(values["chat_template_kwargs"], dict, "chat_template_kwargs", where)
    for name in found:
        if name in _RESERVED or not name.isidentifier():
            got = f'"{name}" in it, which is no variable of a template'
            raise refuse_row(where, '"chat_template_kwargs" of variables of the template', got, "Take it out.")
    if "documents" in values and (documents := _parsed(values["documents"], list, "documents", where)):
        found = {**found, "documents": documents}
    return found


def _without_nulls(values: Any) -> Any:
    """Return lists and objects without null entries of objects."""
    if isinstance(values, list):
        return [_without_nulls(each) for each in values]
    if isinstance(values, dict):
        return {name: _without_nulls(value) for name, value in values.items() if value is not None}
    return values


def is_like_labels(name: str) -> bool:
    """Return whether other trainers read a column, or an entry of a message, as labels, a mask or weights."""
    return _LIKE_LABELS.fullmatch(_WORD_BREAK.sub("_", name).lower()) is not None


def shown(value: object) -> str:
    """Return a value as JSON, shortened; of a container, which may be large, only the kind."""
    if isinstance(value, list | dict):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def refuse_row(where: str, expected: str, got: str, remedy: str = "Correct the row.") -> DataError:
    """Return the DataError for a row."""
    return DataError(where, expected=expected, got=got, remedy=remedy)
