"""Texts of which only a part has a loss: a prompt with its completion, and chats, where assistants' turns have it.

The whole text is encoded once; a token has a loss if one of its characters is to be learned, as in
transformers' mask of assistant tokens. One that begins in a prompt and ends in its completion is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lengthwise.data.dataset import NO_LOSS
from lengthwise.data.messages import Chat
from lengthwise.data.templates import MARKER, Message, Template, Written, text_of, with_text

_THINK = re.compile(r"[<\[]\S*think.*", re.IGNORECASE | re.DOTALL)  # what opens the reasoning of a turn
_UNKNOWN_TURN = "a chat template without {{% generation %}} in whose text message {} is not found"


def encode_pair(tokenizer: Any, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
    """Encode prompt and completion as one text, EOS last, with a loss on the completion and the EOS alone.

    `tokenizer` is one of transformers. Returns ids and labels, int32 [tokens] each. ValueError: it cannot be encoded.
    """
    ids, places = _encode(tokenizer, prompt + completion, special_tokens=True)
    refuse_twice(tokenizer, ids)
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
    tokenizer: Any, chat: Chat, note: Callable[[str, str], None] = lambda _what, _of: None
) -> tuple[np.ndarray, np.ndarray]:
    """Render a chat with the tokenizer's template and encode it, with a loss on the assistants' turns alone.

    Turns are what the template marks as `{% generation %}`; without such marks, what an assistant's message adds to the
    text before it with the prompt for a generation, or, where a template writes earlier turns otherwise than the last
    (as Qwen3's, which leaves their reasoning out), what follows that prompt in the text of the whole chat. The first
    `context` messages have no loss. `note` gets what the template leaves out, and of which message. Returns ids and
    labels, int32 [tokens] each. ValueError: there is no template, it refuses the chat or writes nothing of a turn, or a
    turn is not found.
    """
    template = Template.of(tokenizer, chat)
    written = template.fitted(chat.messages)
    spans, turns = _spans(template, written, chat.context)
    for what, of in template.left_out(written, turns, chat.context):
        note(what, of)
    ids, found = _encode(tokenizer, written.text, special_tokens=False)
    refuse_twice(tokenizer, ids, chat=True)
    starts, ends = np.array(found, dtype=np.int64).reshape(-1, 2).T
    learned = np.zeros(len(ids), dtype=bool)
    for first, last in spans:
        learned |= (ends > first) & (starts < last)
    return _masked(ids, learned)


def refuse_twice(tokenizer: Any, ids: Sequence[int], *, chat: bool = False) -> None:
    """Raise ValueError for ids that begin with BOS twice, or end with EOS twice where the tokenizer adds it."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and list(ids[:2]) == [bos, bos]:
        if chat:
            raise ValueError(f"{tokenizer.bos_token} at its start, which the chat template writes, too (leave it out)")
        twice = f"{tokenizer.bos_token} at its start, which the tokenizer adds, too"
        raise ValueError(f"{twice} (leave it to the tokenizer; give a rendered chat as `messages`)")
    if not chat and eos is not None and list(ids[-2:]) == [eos, eos] and tokenizer("")["input_ids"][-1:] == [eos]:
        raise ValueError(f"{tokenizer.eos_token} at its end, which the tokenizer adds, too (leave it to the tokenizer)")


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the added token that the chat template writes first after an assistant's answer, or None."""
    messages = tuple({"role": role, "content": MARKER} for role in ("user", "assistant"))
    chat = Chat(where="", messages=messages, values={})
    try:
        text = Template.of(tokenizer, chat).fitted(chat.messages).text
    except ValueError:  # no template, or one of other chats
        return None
    _, found, ending = text.rpartition(MARKER)
    added = set(tokenizer.get_added_vocab().values())
    ids = tokenizer(ending, add_special_tokens=False, verbose=False)["input_ids"] if found else []
    return next((each for each in ids if each in added), None)


def _spans(
    template: Template, written: Written, context: int
) -> tuple[list[tuple[int, int]], Mapping[int, tuple[int, int]]]:
    """Return the characters [first, last) that are learned, and those of each turn where it is known."""
    messages, text = written.messages, written.text
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if template.is_marked:
        if len(turns) == len(written.marked):
            found = {turn: span for turn, span in zip(turns, written.marked, strict=True) if turn >= context}
            return list(found.values()), found
        if context:
            raise ValueError(f"a chat template that marks {len(written.marked)} of {len(turns)} turns of the assistant")
        return written.marked, {}
    spans = dict[int, tuple[int, int]]()
    for turn in turns:
        if turn >= context:
            before = template.render(messages[:turn], prompt=True)
            after = template.render(messages[: turn + 1])
            if not (text.startswith(after) and after.startswith(before)):
                found = zip(turns, _turns_in(template, written), strict=True)
                spans = {turn: span for turn, span in found if turn >= context}
                break
            spans[turn] = len(before), len(after)
    return list(spans.values()), spans


def _turns_in(template: Template, written: Written) -> list[tuple[int, int]]:
    """Return where the turns of the assistant are in the text of a whole chat, each after the generation prompt.

    Where other messages are shows when their content is replaced by a marker.

    Raises:
        ValueError: a turn is not found without doubt.
    """
    messages, text = written.messages, written.text

    def marked(turn: int) -> tuple[str, str]:
        """Return the text before and after the content of a message."""
        other = with_text(messages[turn], MARKER)
        left, _, right = template.render([*messages[:turn], other, *messages[turn + 1 :]]).partition(MARKER)
        return left, right

    first = [message["role"] for message in messages].index("assistant")
    before: Sequence[Message] = messages[:first] or [with_text({**messages[first], "role": "user"}, MARKER)]
    prompt = template.render(before, prompt=True).removeprefix(template.render(before))
    answered = with_text({"role": "assistant", "content": messages[first].get("content")}, MARKER)
    ending = template.render([*before, answered]).rpartition(MARKER)[2]
    spans, end = list[tuple[int, int]](), 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            left, right = marked(turn)
            if not (text.startswith(left) and text.endswith(right) and len(left) >= end):
                raise ValueError(_UNKNOWN_TURN.format(turn + 1))
            end = len(text) - len(right)
            continue
        start = text.find(prompt, end) + len(prompt)
        limit = len(text)
        if turn + 1 < len(messages) and messages[turn + 1]["role"] != "assistant":
            limit = len(marked(turn + 1)[0])
        if prompt and start < len(prompt):
            raise ValueError(_UNKNOWN_TURN.format(turn + 1) + _opened(prompt))
        end = text.rfind(ending, start, limit) + len(ending)
        answer = text_of(message).rpartition("</think>")[2].strip()
        if not prompt or not ending or end <= start or answer not in text[start:end]:
            raise ValueError(_UNKNOWN_TURN.format(turn + 1) + _opened(prompt))
        spans.append((start, end))
    return spans


def _opened(prompt: str) -> str:
    """Say that a prompt for a generation opens the reasoning, which not every turn begins with."""
    opening = _THINK.search(prompt)
    if opening is None:
        return ""
    remedy = "write the reasoning of its turns, or take a template that marks turns by {% generation %}"
    return f": its prompt for a generation ends in {opening[0]!r}, and the turn does not begin so ({remedy})"


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
