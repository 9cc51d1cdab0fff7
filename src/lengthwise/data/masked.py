"""Texts with a loss on a part alone: a prompt with its completion, and chats, with a loss on the assistant's turns.

The whole text is encoded once; a token has a loss if one of its characters is to be learned, as in transformers' mask
of assistant tokens. A token that begins in a prompt and ends in its completion is refused.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from lengthwise.data.dataset import NO_LOSS
from lengthwise.data.messages import Chat, text_of
from lengthwise.data.templates import MARKER, Message, Template, Written, replaced

_THINK = re.compile(r"<[^<>\s]*think.*|\[think.*", re.IGNORECASE | re.DOTALL)  # opens the reasoning of a turn
_OF_A_PART = re.compile(r"^(</|\[/)|think|tool.?call", re.IGNORECASE)  # added tokens that end a part of a turn
_PIECES = re.compile(r"<[^<>]*>|\s+|[^<\s]+")
_UNKNOWN_TURN = (
    "a chat template in whose text message {} is not found (join messages of the assistant that follow each other, or "
    "mark the assistant's text in the template by {{% generation %}})"
)


def encode_pair(tokenizer: Any, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
    """Encode prompt and completion as one text, EOS last, with a loss on the completion and the EOS alone.

    tokenizer: a tokenizer of transformers. Returns ids and labels, int32 [tokens] each; ValueError if it cannot encode.
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
        learned[-1] = True  # an EOS that the tokenizer adds has no characters
    return _masked(ids, learned)


def encode_chat(
    tokenizer: Any,
    chat: Chat,
    note: Callable[[str, str], None] = lambda _what, _of: None,
    rewrite: tuple[str, str] = ("", ""),
) -> tuple[np.ndarray, np.ndarray]:
    """Render a chat with the tokenizer's template and encode it, with a loss on the assistant's turns alone.

    A turn is what the template marks as `{% generation %}`. Without marks it is what an assistant's message adds to the
    text before it with the generation prompt. If a template writes earlier turns otherwise than the last (Qwen3's
    leaves their reasoning out), it is what follows that prompt in the text of the whole chat. The first `context`
    messages have no loss. note: function that is called with (what the template leaves out, its message). rewrite: that
    of `Template`.

    Returns ids and labels, int32 [tokens] each. ValueError: there is no template, it refuses the chat or writes nothing
    of a turn, or a turn is not found.
    """
    template = Template.of(tokenizer, chat, rewrite)
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
    of = {span: turn for turn, span in turns.items()} or dict.fromkeys(spans)
    more = _learn_ends(template, written, of, ids, found, learned, note)
    return _masked([*ids, *more], np.append(learned, np.ones(len(more), dtype=bool)))


def _learn_ends(
    template: Template,
    written: Written,
    spans: Mapping[tuple[int, int], int | None],
    ids: Sequence[int],
    places: Sequence[tuple[int, int]],
    learned: np.ndarray,
    note: Callable[[str, str], None],
) -> list[int]:
    """Learn the end of each turn: the first token after each span of characters [first, last) that may end a turn.

    If a template without marks ends no turn, as GLM-4.5's, the token that begins the next message is learned: such
    models stop there, and TRL's training template learns it, too. Otherwise `note` reports that the model would go on.

    Returns the ids to append and learn: the end of the last turn, if the text lacks it.
    """
    shown = [place for place, at in enumerate(places) if written.text[slice(*at)].strip()]
    firsts = [places[place][0] for place in shown]
    for (_, last), turn in spans.items():
        after = bisect_left(firsts, last)
        is_last = after == len(shown)
        if after == 0 or not learned[shown[after - 1]] or (not is_last and learned[shown[after]]):
            continue  # nothing of the span is learned, or what follows it is, too
        if _is_end(template.tokenizer, ids[shown[after - 1]]):
            continue
        end = None if turn is None or template.is_marked else _next_begins(template, written.messages, turn)
        if end is not None and is_last:
            return [end]
        if end is not None and ids[shown[after]] == end:
            learned[shown[after - 1] + 1 : shown[after] + 1] = True
        else:
            of = "in its marks" if turn is None else f"message {turn + 1}"
            note("the end of turns of the assistant, without which a model does not stop (write one into it)", of)
    return []


def _next_begins(template: Template, messages: Sequence[Message], turn: int) -> int | None:
    """Return the token that begins the message after a turn, if the template ends no turn; None before another turn."""
    usual = "tool" if messages[turn].get("tool_calls") else "user"
    role = messages[turn + 1]["role"] if turn + 1 < len(messages) else usual
    if role == "assistant" or _end_of_turn(template.tokenizer, template.source) is not None:
        return None
    return _end_of_turn(template.tokenizer, template.source, role)


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


def ends_of_turns(tokenizer: Any) -> list[int]:
    """Return the added tokens that the chat template writes first after an answer.

    If it ends no turn, as GLM-4.5's: the tokens that begin a following message of a user or a tool, perhaps none.
    """
    try:
        source = Template.of(tokenizer, Chat(where="", messages=(), values={})).source
    except ValueError:  # no template
        return []
    own = _end_of_turn(tokenizer, source)
    ends = [own] if own is not None else [_end_of_turn(tokenizer, source, role) for role in ("user", "tool")]
    return [each for each in ends if each is not None]


@functools.lru_cache(maxsize=64)
def _end_of_turn(tokenizer: Any, source: str, *follows: str) -> int | None:
    """Return the first token after an answer that may end a turn, before messages of these roles, or None."""
    messages = [{"role": role, "content": MARKER} for role in ("user", "assistant", *follows)]
    try:
        parts = Template(tokenizer, source, None, {}).fitted(messages).text.split(MARKER)
    except ValueError:  # the template is for other chats
        return None
    ids = tokenizer(parts[2], add_special_tokens=False, verbose=False)["input_ids"] if parts[2:] else []
    return next((each for each in ids if _is_end(tokenizer, each)), None)


def _is_end(tokenizer: Any, token: int) -> bool:
    """Return whether a token may end a turn: EOS, or an added token other than ends of parts, as `</tool_call>`."""
    added = tokenizer.added_tokens_decoder.get(token)
    return token == tokenizer.eos_token_id or (added is not None and not _OF_A_PART.search(added.content))


def _spans(
    template: Template, written: Written, context: int
) -> tuple[list[tuple[int, int]], Mapping[int, tuple[int, int]]]:
    """Return the characters [first, last) that are learned, and those of each turn, if known."""
    turns = [turn for turn, message in enumerate(written.messages) if message["role"] == "assistant"]
    if not template.is_marked:
        spans = {turn: _turn_in(template, written, turn) for turn in turns if turn >= context}
        return list(spans.values()), spans
    if len(turns) == len(written.marked):
        found = {turn: span for turn, span in zip(turns, written.marked, strict=True) if turn >= context}
        return list(found.values()), found
    if context:
        raise ValueError(f"a chat template that marks {len(written.marked)} of {len(turns)} turns of the assistant")
    return written.marked, {}


def _turn_in(template: Template, written: Written, turn: int) -> tuple[int, int]:
    """Return the characters [first, last) of an assistant's turn in a whole chat, after the generation prompt.

    The turn is what it adds to the text before it. If a template writes the messages before it otherwise in the whole
    chat, as most that keep the reasoning of the last turn alone, its borders are the texts that the template writes
    between messages. ValueError: it is not found without doubt.
    """
    messages, text = written.messages, written.text
    before, after = template.render(messages[:turn], prompt=True), template.render(messages[: turn + 1])
    if text.startswith(after) and after.startswith(before):
        return len(before), len(after)
    starts = (_after(template, written, each, turn, _prompts) for each in reversed(range(turn)))
    start = next((each for each in starts if each is not None), None)
    end = len(text) if turn + 1 == len(messages) else _after(template, written, turn, turn + 1, _ends)
    answer = text_of(messages[turn]).rpartition("</think>")[2].strip()
    if start is None or end is None or end <= start or answer not in text[start:end]:
        if all(template.is_unread(written, turn, other) for other in replaced(messages[turn])):
            raise ValueError(f"an empty turn: the chat template leaves out message {turn + 1} (take it out of the row)")
        raise ValueError(_UNKNOWN_TURN.format(turn + 1))
    return start, end


def _after(
    template: Template, written: Written, turn: int, stop: int, between: Callable[[Template, str, str], Iterator[str]]
) -> int | None:
    """Return where a text goes on after a message and the longest text that is `between` it and message `stop`.

    A marker in place of a part of the message shows where it lies. between: function that yields candidate texts, from
    what follows the marker in a chat that ends before `stop`, without and with the generation prompt. None: not known.
    """
    messages, text = written.messages, written.text
    for other in replaced(messages[turn]):
        until = [*messages[:turn], other, *messages[turn + 1 : stop]]
        try:
            texts = [template.render(until), template.render(until, prompt=True)]
            texts.append(template.render([*until, *messages[stop:]]))
        except ValueError:
            continue  # the template reads messages of another form
        if not all(MARKER in each for each in texts):
            continue
        ending, prompted, follows = (each.rpartition(MARKER)[2] for each in texts)
        for tail in sorted(between(template, ending, prompted), key=len, reverse=True):
            if follows.startswith(tail) and text.endswith(follows[len(tail) :]):
                return len(text) - len(follows) + len(tail)
    return None


def _prompts(_template: Template, _ending: str, prompted: str) -> Iterator[str]:
    """Yield the prompt for a turn, and the prompt with less of the reasoning it opens, which not all turns have."""
    yield prompted
    if opening := _THINK.search(prompted):
        yield from (prompted[: opening.start() + piece.start()] for piece in _PIECES.finditer(opening[0]))


def _ends(template: Template, ending: str, prompted: str) -> Iterator[str]:
    """Yield ends of a turn: all text after the last one of a chat, and the text before the prompt for the next."""
    yield ending
    asked = [{"role": "user", "content": MARKER}]
    without, prompt = (template.render(asked, prompt=each).rpartition(MARKER)[2] for each in (False, True))
    same = len(without) if prompt.startswith(without) else _common(template.tokenizer, without, prompt)
    if prompted.endswith(prompt[same:]):
        yield prompted[: len(prompted) - len(prompt[same:])]


def _common(tokenizer: Any, first: str, second: str) -> int:
    """Return the number of characters that two texts have in common at the start, in whole tokens."""
    both = (list(zip(*_encode(tokenizer, text, special_tokens=False), strict=True)) for text in (first, second))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*both, strict=False))
    return max((token[1][1] for token, _ in same), default=0)


def _encode(tokenizer: Any, text: str, *, special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Return ids, and the characters [first, last) of each token; (0, 0) for tokens that the tokenizer adds."""
    text.encode("utf-8")  # a lone surrogate cannot be encoded
    if not tokenizer.is_fast:
        raise ValueError("a tokenizer that does not tell where its tokens are (a slow one)")
    found = tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=True, verbose=False)
    return found["input_ids"], found["offset_mapping"]


def _masked(ids: Sequence[int], learned: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array(ids, dtype=np.int32)
    return tokens, np.where(learned, tokens, np.int32(NO_LOSS)).astype(np.int32)
