"""Texts of which only a part has a loss: a prompt with its completion, and chats, where assistants' turns have it.

The whole text is encoded once; a token has a loss if one of its characters is to be learned, as in
transformers' mask of assistant tokens. One that begins in a prompt and ends in its completion is refused.
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
from lengthwise.data.messages import Chat
from lengthwise.data.templates import MARKER, Message, Template, Written, replaced, text_of

_THINK = re.compile(r"<[^<>\s]*think.*|\[think.*", re.IGNORECASE | re.DOTALL)  # what opens the reasoning of a turn
_OF_A_PART = re.compile(r"^(</|\[/)|think|tool.?call", re.IGNORECASE)  # added tokens that end a part of a turn
_PIECES = re.compile(r"<[^<>]*>|\s+|[^<\s]+")
_UNKNOWN_TURN = (
    "a chat template in whose text message {} is not found (join messages of the assistant that follow each other, or "
    "mark the assistant's text in the template by {{% generation %}})"
)


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
    """Learn what ends each span of characters, [first, last), with its turn where it is known.

    Where a template without marks ends no turn, as GLM-4.5's, what begins the next message does: such models stop
    there, and TRL's training template learns it, too. Otherwise `note` gets that a model would go on.

    Returns:
        Ids to be added, and learned: the end of the last turn, where it is not in the text.
    """
    shown = [place for place, at in enumerate(places) if written.text[slice(*at)].strip()]
    firsts = [places[place][0] for place in shown]
    for (_, last), turn in spans.items():
        after = bisect_left(firsts, last)
        is_last = after == len(shown)
        if after == 0 or not learned[shown[after - 1]] or (not is_last and learned[shown[after]]):
            continue  # nothing of it is learned, or what follows it, too
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
    """Return the token that begins the message after a turn, where the template ends none; None before a turn, too."""
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
    """Return the token that the chat template writes first after an answer, added ones alone.

    Where it ends no turn, as GLM-4.5's, those are what begins the message of a user or a tool after it; perhaps none.
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
    """Return the first token after an answer that may end a turn, where messages of these roles follow, or None."""
    messages = [{"role": role, "content": MARKER} for role in ("user", "assistant", *follows)]
    try:
        parts = Template(tokenizer, source, None, {}).fitted(messages).text.split(MARKER)
    except ValueError:  # a template of other chats
        return None
    ids = tokenizer(parts[2], add_special_tokens=False, verbose=False)["input_ids"] if parts[2:] else []
    return next((each for each in ids if _is_end(tokenizer, each)), None)


def _is_end(tokenizer: Any, token: int) -> bool:
    """Return whether a token may end a turn: EOS, and added ones but for those of a part of it, as `</tool_call>`."""
    added = tokenizer.added_tokens_decoder.get(token)
    return token == tokenizer.eos_token_id or (added is not None and not _OF_A_PART.search(added.content))


def _spans(
    template: Template, written: Written, context: int
) -> tuple[list[tuple[int, int]], Mapping[int, tuple[int, int]]]:
    """Return the characters [first, last) that are learned, and those of each turn where it is known."""
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
    """Return where a turn of the assistant is in the text of a whole chat, after the prompt for it.

    That is what it adds to the text before it; a template may write the messages up to it otherwise than in the whole
    chat, as most that write the reasoning of the last turn alone. Then it begins and ends where text that the template
    writes between messages does.

    Raises:
        ValueError: it is not found without doubt.
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

    Where the message is shows when a part of it is replaced by a marker. `between` yields texts, given what follows the
    marker in a chat that ends before `stop`, without the prompt for a generation and with it. None: it is not known.
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
    """Yield what prompts for a turn: all of it, and less of the reasoning that it opens, which not all turns have."""
    yield prompted
    if opening := _THINK.search(prompted):
        yield from (prompted[: opening.start() + piece.start()] for piece in _PIECES.finditer(opening[0]))


def _ends(template: Template, ending: str, prompted: str) -> Iterator[str]:
    """Yield what ends a turn: all that follows the last of a chat, and what precedes the prompt for the next."""
    yield ending
    asked = [{"role": "user", "content": MARKER}]
    without, prompt = (template.render(asked, prompt=each).rpartition(MARKER)[2] for each in (False, True))
    same = len(without) if prompt.startswith(without) else _common(template.tokenizer, without, prompt)
    if prompted.endswith(prompt[same:]):
        yield prompted[: len(prompted) - len(prompt[same:])]


def _common(tokenizer: Any, first: str, second: str) -> int:
    """Return how many characters two texts have in common at the start, in whole tokens."""
    both = (list(zip(*_encode(tokenizer, text, special_tokens=False), strict=True)) for text in (first, second))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*both, strict=False))
    return max((token[1][1] for token, _ in same), default=0)


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
