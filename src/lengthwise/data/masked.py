"""Texts of which only a part has a loss: a prompt with its completion, and chats, where assistants' turns have it.

The whole text is encoded once; a token has a loss when a character of it lies in what is to be learned, as in
transformers' mask of assistant tokens. One that begins in a prompt and ends in its completion is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lengthwise.data.dataset import NO_LOSS

Message = Mapping[str, Any]
_MARKER = "\ue000message\ue001"  # of the private use area: in no text
_UNKNOWN_TURN = "a chat template without {{% generation %}} in whose text message {} is not found"
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_pair(tokenizer: Any, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
    """Encode prompt and completion as one text, EOS last, with a loss on the completion and the EOS alone.

    `tokenizer` is one of transformers. Returns ids and labels, int32 [tokens] each. ValueError: it cannot be encoded.
    """
    ids, places = _encode(tokenizer, prompt + completion, special_tokens=True)
    if any(first < len(prompt) < last for first, last in places):
        raise ValueError("a token across the end of the prompt (a space there belongs to the completion)")
    starts, eos = [first for first, _ in places], tokenizer.eos_token_id
    if eos is not None and (not ids or ids[-1] != eos):
        ids, starts = [*ids, eos], [*starts, len(prompt + completion)]
    learned = np.array(starts, dtype=np.int64) >= len(prompt)
    if ids and ids[-1] == eos:
        learned[-1] = True  # where the tokenizer adds it, it has no place in the text
    return _masked(ids, learned)


def encode_chat(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None, context: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Render a chat with the tokenizer's template and encode it, with a loss on the assistants' turns alone.

    Turns are what the template marks as `{% generation %}`; without such marks, what an assistant's message adds to the
    text before it with the prompt for a generation, or, where a template writes earlier turns otherwise than the last
    (as Qwen3's, which leaves their reasoning out), what follows that prompt in the text of the whole chat. The first
    `context` messages have no loss. Returns ids and labels, int32 [tokens] each. ValueError: there is no template, it
    refuses the chat, or a turn is not found.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("a tokenizer without a chat template")
    text, spans = _spans(tokenizer, messages, tools, context)
    ids, found = _encode(tokenizer, text, special_tokens=False)
    starts, ends = np.array(found, dtype=np.int64).reshape(-1, 2).T
    learned = np.zeros(len(ids), dtype=bool)
    for first, last in spans:
        learned |= (ends > first) & (starts < last)
    return _masked(ids, learned)


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the added token that the chat template writes first after an assistant's answer; None: there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    chat = [{"role": role, "content": _MARKER} for role in ("user", "assistant")]
    try:
        text, _ = _render(tokenizer, tokenizer.get_chat_template(), chat, None)
    except ValueError:  # a template of other chats
        return None
    _, found, ending = text.rpartition(_MARKER)
    added = set(tokenizer.get_added_vocab().values())
    ids = tokenizer(ending, add_special_tokens=False, verbose=False)["input_ids"] if found else []
    return next((each for each in ids if each in added), None)


def _spans(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None, context: int
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a chat, and the characters [first, last) of each turn that is learned."""
    template = tokenizer.get_chat_template(tools=tools)
    text, marked = _render(tokenizer, template, messages, tools, marks=bool(_MARK.search(template)))
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if _MARK.search(template):
        if context and len(turns) != len(marked):
            raise ValueError(f"a chat template that marks {len(marked)} of {len(turns)} turns of the assistant")
        return text, [span for turn, span in zip(turns, marked, strict=True) if turn >= context] if context else marked
    spans = []
    for turn in turns:
        if turn >= context:
            before, _ = _render(tokenizer, template, messages[:turn], tools, add_generation_prompt=True)
            after, _ = _render(tokenizer, template, messages[: turn + 1], tools)
            if not (text.startswith(after) and after.startswith(before)):
                found = _turns_in(text, tokenizer, template, messages, tools)
                return text, [span for turn, span in zip(turns, found, strict=True) if turn >= context]
            spans.append((len(before), len(after)))
    return text, spans


def _turns_in(
    text: str, tokenizer: Any, template: str, messages: Sequence[Message], tools: Sequence[Any] | None
) -> list[tuple[int, int]]:
    """Return where the turns of the assistant are in the text of a whole chat, each after the generation prompt.

    Where other messages are shows when their content is replaced by a marker.

    Raises:
        ValueError: a turn is not found without doubt.
    """

    def render(some: Sequence[Message], *, prompt: bool = False) -> str:
        return _render(tokenizer, template, some, tools, add_generation_prompt=prompt)[0]

    first = [message["role"] for message in messages].index("assistant")
    before = messages[:first] or [{"role": "user", "content": _MARKER}]
    prompt = render(before, prompt=True).removeprefix(render(before))
    ending = render([*before, {"role": "assistant", "content": _MARKER}]).rpartition(_MARKER)[2]
    spans, end = list[tuple[int, int]](), 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            replaced = render([*messages[:turn], {**message, "content": _MARKER}, *messages[turn + 1 :]])
            left, _, right = replaced.partition(_MARKER)
            if not (text.startswith(left) and text.endswith(right) and len(left) >= end):
                raise ValueError(_UNKNOWN_TURN.format(turn + 1))
            end = len(text) - len(right)
            continue
        start = text.find(prompt, end) + len(prompt)
        following = messages[turn + 1 :]
        limit = len(text)
        if following and following[0]["role"] != "assistant":
            replaced = render([*messages[: turn + 1], {**following[0], "content": _MARKER}, *following[1:]])
            limit = len(replaced.partition(_MARKER)[0])
        end = text.rfind(ending, start, limit) + len(ending)
        answer = str(message.get("content") or "").rpartition("</think>")[2].strip()
        if not prompt or not ending or start < len(prompt) or end <= start or answer not in text[start:end]:
            raise ValueError(_UNKNOWN_TURN.format(turn + 1))
        spans.append((start, end))
    return spans


def _render(
    tokenizer: Any,
    template: str,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    *,
    marks: bool = False,
    add_generation_prompt: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Render as `apply_chat_template` does; with `marks` also return where `{% generation %}` was.

    Its own mask of tokens is not taken: where a mark ends in a space, it goes on to the end of the chat (5.17).
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, marked = render_jinja_template(
            conversations=[[dict(message) for message in messages]],
            tools=None if tools is None else list(tools),
            chat_template=template,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=add_generation_prompt,
            **tokenizer.special_tokens_map,
        )
    except Exception as error:  # noqa: BLE001 - templates are programs of others, and raise what they like
        raise ValueError(f"a chat that the template refuses: {type(error).__name__}: {str(error)[:200]}") from None
    return rendered[0], [(int(first), int(last)) for first, last in marked[0]] if marks else []


def _encode(tokenizer: Any, text: str, *, special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Return ids, and the characters [first, last) of each token in the text; (0, 0) for what the tokenizer adds."""
    text.encode("utf-8")  # a lone surrogate is no text
    if not tokenizer.is_fast:
        raise ValueError("a tokenizer that does not tell where its tokens are (a slow one)")
    found = tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=True, verbose=False)
    return found["input_ids"], found["offset_mapping"]


def _masked(ids: Sequence[int], learned: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array(ids, dtype=np.int32)
    return tokens, np.where(learned, tokens, np.int32(NO_LOSS)).astype(np.int32)
