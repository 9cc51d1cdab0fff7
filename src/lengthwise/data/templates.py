"""Chat templates: write a chat in the form that its template leaves out least of, and report what is left out.

Templates differ in what they read. Most write `content` as it is, so missing content must be the empty text; some write
calls only if `content` is null; some write `arguments` only as text; some read only parts of content. The first form
with the fewest omissions counts. A part is in the text if its replacement changes the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lengthwise.data.messages import REASONING, Chat, text_of

Message = Mapping[str, Any]
MARKER = "\ue000message\ue001"  # private use area: no text has it
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINK_END = "</think>"
_REASONING, _CALL = "the reasoning", "a tool call"
_LONG = 20  # characters that occur in a text once, most likely
_NULLS = ("None", "null")  # how templates write null


@dataclass(frozen=True, slots=True)
class Template:
    """The chat template of a tokenizer for a chat with its tools. values: further names that the template sees.

    rewrite: a word of rendered texts, and what stands in its place. Raises ValueError if there is no template, or it
    refuses the chat.
    """

    tokenizer: Any
    source: str
    tools: tuple[Any, ...] | None
    values: Mapping[str, Any]
    rewrite: tuple[str, str] = ("", "")

    @classmethod
    def of(cls, tokenizer: Any, chat: Chat, rewrite: tuple[str, str] = ("", "")) -> Template:
        """Return the tokenizer's template for a chat."""
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("a tokenizer without a chat template")
        source = tokenizer.get_chat_template(tools=None if chat.tools is None else list(chat.tools))
        unread = [name for name in chat.values if not _reads(source, name)]
        contents = [
            name for name in unread if chat.values[name] and not isinstance(chat.values[name], bool | int | float)
        ]
        if contents:
            raise ValueError(f'"{contents[0]}", which the chat template does not read (take it out of the row)')
        return cls(tokenizer, source, chat.tools, chat.values, rewrite)

    @property
    def is_marked(self) -> bool:
        """Whether the template marks the assistant's text by `{% generation %}`."""
        return bool(_MARK.search(self.source))

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Render as `apply_chat_template` does. prompt: True adds the generation prompt at the end.

        Marks of `{% generation %}` are read here, because transformers' own mask goes on to the end of the chat if a
        mark ends in a space (5.17).
        """
        return self._render(messages, marks=False, prompt=prompt)[0]

    def _render(self, messages: Sequence[Message], *, marks: bool, prompt: bool) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, marked = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=None if self.tools is None else list(self.tools),
                chat_template=self.source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **{**self.tokenizer.special_tokens_map, **self.values},
            )
        except Exception as error:  # noqa: BLE001 - templates are programs of others, and raise what they like
            raise ValueError(f"a chat that the template refuses: {type(error).__name__}: {str(error)[:200]}") from None
        text: str = rendered[0]
        found = [(int(first), int(last)) for first, last in marked[0]] if marks else []
        word, other = self.rewrite
        if word == other:
            return text, found

        def moved(place: int) -> int:  # a word that begins before a place ends before it
            return place + (len(other) - len(word)) * text.count(word, 0, place)

        return text.replace(word, other), [(moved(first), moved(last)) for first, last in found]

    def fitted(self, messages: Sequence[Message]) -> Written:
        """Return messages in the first form of which the template leaves out least."""
        best, least, refused, plain = None, 0, None, ""
        for form in _forms(messages):
            try:
                text, marked = self._render(form, marks=self.is_marked, prompt=False)
            except ValueError as error:
                refused = refused or error
                continue
            found = Written(form, text, marked)
            if form is messages:
                plain = text
            elif _writes_null(form, text, plain):
                continue
            lost = sum(what != _REASONING for _, what, _ in self._lost(found, {}, _first_of_each(form)))
            if best is None or lost < least:
                best, least = found, lost
            if not lost:
                break
        if best is None:
            assert refused is not None, "the first form was rendered, or refused"
            raise refused
        return best

    def left_out(self, written: Written, spans: Mapping[int, tuple[int, int]], context: int) -> list[tuple[str, str]]:
        """Return (part of a message, message) pairs that the text of a chat lacks.

        spans: characters of the learned turns in the text. Turns before message `context` are not learned. Raises
        ValueError if the text has nothing of a learned turn.
        """
        turns = _first_of_each(written.messages)
        turns |= {turn for turn, each in enumerate(written.messages) if each["role"] not in ("user", "tool")}
        found, lost = list[tuple[str, str]](), self._lost(written, spans, turns)
        for turn, what, is_all in lost:
            role = written.messages[turn]["role"]
            if is_all and role == "assistant" and turn >= context:
                raise ValueError(f"an empty turn: the chat template leaves out {what} of message {turn + 1}")
            found.append((f"{what} of {role} messages", f"message {turn + 1}"))
        if self.tools and not _reads(self.source, "tools"):
            found.append(("the tools", "column tools"))
        return found + [(name, "in chat_template_kwargs") for name in self.values if not _reads(self.source, name)]

    def _lost(
        self, written: Written, spans: Mapping[int, tuple[int, int]], turns: Collection[int]
    ) -> list[tuple[int, str, bool]]:
        """Return per message: the parts the template dropped, and whether that is the whole message."""
        found = list[tuple[int, str, bool]]()
        for turn in sorted(turns):
            message = written.messages[turn]
            region = written.text[slice(*spans[turn])] if turn in spans else written.text
            parts = list(_parts(message))
            lost = list[str]()
            for what, word, other in parts:
                # Names of functions are in the tools, too, and a short text occurs anywhere, as in the end of a turn.
                is_its_own = turn in spans and word not in self.source
                looked_for = word and (is_its_own or (what != _CALL and len(word) >= _LONG))
                if not (looked_for and word in region) and self.is_unread(written, turn, other):
                    lost.append(what)
            found += [(turn, what, len(lost) == len(parts)) for what in dict.fromkeys(lost)]
        return found

    def is_unread(self, written: Written, turn: int, other: Message) -> bool:
        """Return whether the text stays the same with another message in place of one."""
        try:
            return self.render([*written.messages[:turn], other, *written.messages[turn + 1 :]]) == written.text
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class Written:
    """Messages in the form that a template got, their text, and its marked characters [first, last)."""

    messages: Sequence[Message]
    text: str
    marked: list[tuple[int, int]]


def with_text(message: Message, text: str) -> Message:
    """Return a message with another content in the same form."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return {**message, "content": text}
    last = max((place for place, part in enumerate(parts) if "text" in part), default=len(parts))
    before, after = ([part for part in each if "text" not in part] for each in (parts[:last], parts[last:]))
    return {**message, "content": [*before, {"type": "text", "text": text}, *after]}


def replaced(message: Message) -> Iterator[Message]:
    """Yield a message with a marker as its content, then with one as the arguments of its last call."""
    yield with_text(message, MARKER)
    if calls := message.get("tool_calls"):
        yield {**message, "tool_calls": [*calls[:-1], _changed_call(calls[-1], _other_arguments)]}


def _forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield messages unchanged, then in the forms that other templates read."""
    yield messages
    if any(message.get("tool_calls") for message in messages):
        as_text = [_with_calls(message, _with_text_arguments) for message in messages]
        for form in (messages, as_text):
            nulls = [{**each, "content": None} if _is_call_alone(each) else each for each in form]
            yield from ([form] if form is not messages else [])
            yield from ([nulls] if nulls != form else [])
    yield [
        message if isinstance(message["content"], list) else with_text({**message, "content": []}, text_of(message))
        for message in messages
    ]


def _first_of_each(messages: Sequence[Message]) -> set[int]:
    """Return the first message of every role with the same kinds of parts; a template treats the others alike."""
    kinds = [
        (
            each["role"],
            bool(text_of(each)),
            type(each.get("content")) is list,
            bool(each.get("tool_calls")),
            any(map(each.get, REASONING)),
        )
        for each in messages
    ]
    return {kinds.index(kind) for kind in kinds}


def _is_call_alone(message: Message) -> bool:
    return bool(message.get("tool_calls")) and not message["content"]


def _writes_null(form: Sequence[Message], text: str, plain: str) -> bool:
    """Return whether null content became a word: the text has it more often than without, and than the calls do."""
    calls = json.dumps([message.get("tool_calls") for message in form if message.get("content") is None])
    return calls != "[]" and any(text.count(word) > plain.count(word) + calls.count(word) for word in _NULLS)


def _parts(message: Message) -> Iterator[tuple[str, str, Message]]:
    """Yield (part's name, text that shows it, message with another value there) for every part of a message."""
    thought = {name: MARKER for name in REASONING if message.get(name)}
    if thought:
        yield _REASONING, str(message[next(iter(thought))]).strip(), {**message, **thought}
    content = text_of(message)
    head, end, answer = content.rpartition(_THINK_END) if message["role"] == "assistant" else ("", "", content)
    if words := head.removeprefix("<think>").strip():
        yield _REASONING, words, with_text(message, f"<think>{MARKER}{end}{answer}")
    if answer.strip():
        yield "the content", answer.strip(), with_text(message, head + end + MARKER)
    calls = message.get("tool_calls") or ()
    for place, call in enumerate(calls):
        other = [*calls[:place], _changed_call(call, _other_call), *calls[place + 1 :]]
        yield _CALL, str(call.get("function", call).get("name") or ""), {**message, "tool_calls": other}


def _changed_call(call: Message, change: Callable[[Message], Message]) -> Message:
    return {**call, "function": change(call["function"])} if "function" in call else change(call)


def _with_calls(message: Message, change: Callable[[Message], Message]) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_changed_call(each, change) for each in calls]} if calls else message


def _with_text_arguments(call: Message) -> Message:
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)} if "arguments" in call else call


def _other_arguments(call: Message) -> Message:
    return {**call, "arguments": MARKER if isinstance(call.get("arguments"), str) else {MARKER: MARKER}}


def _other_call(call: Message) -> Message:
    return {**_other_arguments(call), "name": MARKER}


def _reads(source: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", source) is not None
