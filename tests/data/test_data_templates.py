"""What chat templates do with a chat: no null becomes text, nothing is left out without a word."""

import re
import warnings
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.stores import save_words
from lengthwise.data import NO_LOSS, load_tokenizer
from lengthwise.data.masked import encode_chat
from lengthwise.data.messages import chat_of
from lengthwise.data.tokenizer import HuggingFaceTokenizer
from tiers import more

CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }} {% endfor %}"
TEXT_CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' + c.function.arguments }} {% endfor %}"


def template(content, calls=CALLS, *, prompt="<assistant> ", role="<{{ m.role }}> "):
    each = "{% for m in messages %}" + role + content + calls + "<end> {% endfor %}"
    return each + "{% if add_generation_prompt %}" + prompt + "{% endif %}"


NOT_TESTED = template("{{ m['content'] }} ")
OF_PARTS = template("{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }} {% endif %}{% endfor %}")
IF_NULL = template("{% if m.content is none %}" + TEXT_CALLS + "{% else %}{{ m.content }} {% endif %}", "")
WITHOUT_CALLS = template("{{ m.content }} ", "")
EMPTY_MARKS = WITHOUT_CALLS.replace("<end>", "{% generation %}<end>{% endgeneration %}")
FORMS = {
    "not tested": NOT_TESTED,
    "tested": template("{% if m.content %}{{ m.content }} {% endif %}"),
    "tested for null": template("{% if m.content is not none %}{{ m.content }} {% endif %}"),
    "tested for being there": template("{% if 'content' in m %}{{ m.content }} {% endif %}"),
    "got": template("{{ m.get('content') }} "),
    "added": template("{{ m.content + ' ' }}"),
    "stripped": template("{{ m.content.strip() | trim }} "),
    "arguments as text": template("{{ m['content'] }} ", TEXT_CALLS),
    "calls where null": IF_NULL,
    "parts": OF_PARTS,
}
ASKED = {"role": "user", "content": "a"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "y"}}}]}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
ANSWER = {"role": "assistant", "content": "b"}


@pytest.fixture
def encode(tmp_path):
    """Encode a row by a template; return the words of it, and those with a loss."""

    def encode_row(row, source):
        names = ("unk", "user", "assistant", "tool", "system", "end", "think", "/think")
        words = [*(f"<{name}>" for name in names), *"abcdfs", "None", "null", '{"x":', '"y"}', '"None"}']
        tokenizer = load_tokenizer(save_words(tmp_path / "tokenizer", words, template=source))
        chat = chat_of(row, "rows:1")
        ids, labels = tokenizer.encode_chat(chat)
        again = tokenizer.encode_chat(chat)  # what is said of a template is said once
        assert (again[0].tolist(), again[1].tolist()) == (ids.tolist(), labels.tolist())
        return " ".join(words[i] for i in ids), " ".join(words[i] for i in labels if i != NO_LOSS)

    return encode_row


@pytest.mark.parametrize("form", FORMS)
def test_null_content_is_no_text_and_a_call_without_content_the_call_alone_by_every_template(encode, form):
    for content in ({}, {"content": None}, {"content": ""}):
        turns = [ASKED, {**CALL, **content}, {"role": "tool", "content": "c"}, ANSWER]
        text, learned = encode({"messages": turns}, FORMS[form])
        assert text == '<user> a <end> <assistant> f {"x": "y"} <end> <tool> c <end> <assistant> b <end>', content
        assert learned == 'f {"x": "y"} <end> b <end>', content
    text, _ = encode({"messages": [{"role": "system", "content": None}, {"role": "user"}, ANSWER]}, FORMS[form])
    assert text == "<system> <end> <user> <end> <assistant> b <end>"


@pytest.mark.parametrize("form", ["not tested", "calls where null", "parts"])
def test_the_word_none_of_a_row_stays(encode, form):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "None"}}}]}
    rows = [{"role": "user", "content": "None"}, call, {"role": "tool", "content": "null"}, ANSWER]
    text, _ = encode({"messages": rows}, FORMS[form])
    assert text == '<user> None <end> <assistant> f {"x": "None"} <end> <tool> null <end> <assistant> b <end>'


LAST_THOUGHT = template(
    "{% if loop.last and m.reasoning_content %}<think> {{ m.reasoning_content }} </think> {% endif %}{{ m.content }} "
)
NO_SYSTEM = template("{{ m.content if m.role != 'system' }} ")
THOUGHTS = [ASKED, {**ANSWER, "reasoning_content": "c"}, ASKED, {**ANSWER, "reasoning_content": "d"}]
ANSWERED = {"messages": [ASKED, ANSWER]}
CALLED_AND_SAID = {"messages": [ASKED, {**CALL, "content": "b"}]}
LEFT_OUT = {  # a row, a template, what is said of it
    "reasoning": ({"messages": THOUGHTS}, LAST_THOUGHT, "the reasoning of assistant messages (message 2)"),
    "calls": (CALLED_AND_SAID, WITHOUT_CALLS, "a tool call of assistant messages (message 2)"),
    "calls beside parts": (CALLED_AND_SAID, OF_PARTS.replace(CALLS, ""), "a tool call of assistant messages"),
    "tools": ({**ANSWERED, "tools": [{"name": "f"}]}, NOT_TESTED, "the tools (column tools)"),
    "values": ({**ANSWERED, "chat_template_kwargs": {"think": False}}, NOT_TESTED, "think (in chat_template_kwargs)"),
    "system": ({**ANSWERED, "system": "s"}, NO_SYSTEM, "the content of system messages (message 1)"),
    "ends": (ANSWERED, NOT_TESTED.replace("<end>", ""), "the end of turns of the assistant, without which a model"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_a_template_leaves_out_is_said_once(encode, case):
    row, source, said = LEFT_OUT[case]
    with pytest.warns(UserWarning, match="leaves out") as caught:
        text, _ = encode(row, source)
    assert [str(each.message)[:30] for each in caught] == ["rows:1: the chat template of /"]
    assert said in str(caught[0].message)
    assert text.endswith("b" if case == "ends" else "b <end>")


REFUSED = {
    "a call": ({"messages": [ASKED, CALL]}, WITHOUT_CALLS, "an empty turn: .* leaves out a tool call of message 2"),
    "marked": ({"messages": [ASKED, CALL]}, EMPTY_MARKS, "an empty turn: .* leaves out a tool call of message 2"),
    "content": (ANSWERED, template("{{ m.text }} "), "an empty turn: .* the content of message 2"),
    "documents": ({**ANSWERED, "documents": [{"text": "d"}]}, NOT_TESTED, '"documents", which the chat'),
    "values": ({**ANSWERED, "chat_template_kwargs": {"notes": "d"}}, NOT_TESTED, '"notes", which the chat'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_turn_of_which_nothing_is_learned_is_refused_with_its_reason(encode, case):
    row, source, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        encode(row, source)


def test_values_of_a_row_reach_the_template(encode):
    source = "{% if c %}{{ c }} {% endif %}{{ documents[0].text }} " + NOT_TESTED
    row = {"messages": [ASKED, ANSWER], "documents": [{"text": "d"}], "chat_template_kwargs": '{"c": "c"}'}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert encode(row, source)[0].startswith("c d <user>")


def shipped():
    """Return the templates of TRL's, those of models and for training, by name."""
    folder = Path(find_spec("trl").origin).parent / "chat_templates"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


def letters(source, eos="<eos>"):
    """Return a tokenizer of bytes, and of the tokens in angles that a template has."""
    special = sorted({*re.findall(r"<[|｜/a-zA-Z_][^<>\n\"'{} ]{0,30}>", source), "<bos>", "<eos>", "</s>"})
    words = {word: number for number, word in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocab=words, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token=eos)
    made.add_tokens(special, special_tokens=True)
    made.chat_template = source
    return made


ENDS = {  # what models stop at, by the beginning of a template's name
    "cohere": r"<\|END_OF_TURN_TOKEN\|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "diffusion_gemma": r"<turn\|>|<\|tool_response>",
    "gemma4": r"<turn\|>|<\|tool_response>",
    "gemma": "<end_of_turn>",
    "glm4moe": r"<\|user\|>|<\|observation\|>",
    "gptoss": r"<\|return\|>|<\|end\|>|<\|call\|>",
    "idefics3": "<end_of_utterance>",
    "llama3": r"<\|eot_id\|>|<\|eom_id\|>",
    "llava": "</s>",
    "muse": r"<\|eot\|>|<\|end\|>|<\|eom\|>",
    "phi3": r"<\|end\|>",
    "smolvlm": "<end_of_utterance>",
    "": r"<\|im_end\|>",
}
HEADERS = ("<|im_start|>", "<start_of_turn>", "<|START_OF_TURN_TOKEN|>", "<|start_header_id|>", "<|assistant|>")
ENDLESS = ("deepseek_r1_distill", "deepseek_r1_distill_training", "diffusion_gemma_training")  # after a call
CALLED_FUNCTION = {"name": "f", "arguments": {"x": "PLACE"}}
CALLED = {"role": "assistant", "tool_calls": [{"type": "function", "id": "abcdefghi", "function": CALLED_FUNCTION}]}
RESULT = {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": "FOUND"}
SAID = [(role, f"{role[0].upper()}{number}END") for number in "123" for role in ("user", "assistant")]
TURNS = [{"role": role, "content": text} for role, text in SAID]
WHY = [{"reasoning_content": f"WHY{turn['content']}"} if turn["role"] == "assistant" else {} for turn in TURNS]
REASONED = [{**turn, **why} for turn, why in zip(TURNS, WHY, strict=True)]
TALKS = {
    "one turn": TURNS[:2],
    "three turns": TURNS,
    "system": [{"role": "system", "content": "RULES"}, *TURNS[:4]],
    "reasoning": REASONED,
    "calls": [TURNS[0], CALLED, RESULT, *TURNS[1:4]],
    "calls later": [*TURNS[:3], CALLED, RESULT, TURNS[3]],
    "a call last": [*TURNS[:3], CALLED],
    "reasoning and calls": [TURNS[0], {**CALLED, "reasoning_content": "WHYCALL"}, RESULT, *REASONED[1:4]],
}
USUAL = ("qwen3", "qwen3_5_think", "gptoss", "glm4moe", "deepseekv3", "phi3", "nemotron_3_nano")


@pytest.mark.parametrize("name", [name if name in USUAL else more(name) for name in shipped()])
def test_chats_of_a_family_have_a_loss_on_answers_and_their_ends_alone(name):
    """Words that are in no other message show of whom a token is."""
    tokenizer = letters(shipped()[name], eos="</s>" if name.startswith("llava") else "<eos>")
    end = next(end for beginning, end in ENDS.items() if name.startswith(beginning))
    tools = [{"type": "function", "function": TOOL}]
    refused = {}
    for of, turns in TALKS.items():
        said = []
        chat = chat_of({"messages": turns, **({"tools": tools} if "call" in of else {})}, "rows:1")
        try:
            ids, labels = encode_chat(tokenizer, chat, lambda *what, said=said: said.append(str(what)))
        except ValueError as error:
            refused[of] = str(error)
            continue
        runs = list(runs_of(tokenizer, ids, labels))
        words = "\n".join(runs)
        assert not ({"None", "null"} & set(re.findall(r"\w+", tokenizer.decode(ids)))), "of a call without content"
        for turn in turns:
            word = turn.get("content") or "PLACE"
            assert (word in words) == (turn["role"] == "assistant"), (of, turn, runs)
        assert len(runs) == sum(turn["role"] == "assistant" for turn in turns), (of, runs)
        assert not any(header in words for header in HEADERS), (of, runs)
        unended = [run for run in runs if not re.search(rf"({end})\s*(<eos>)?\s*$", run)]
        assert all("PLACE" in run for run in unended), (of, runs)
        assert bool(unended) == (name in ENDLESS and "call" in of), (of, runs)
        assert bool(unended) == ("without which a model does not stop" in str(said))
    for of, why in refused.items():  # by templates without a system prompt, or without tools
        assert re.match(r"a chat that the template refuses: |an empty turn: the chat template leaves", why), of
        assert of == "system" or "call" in of


def runs_of(tokenizer, ids, labels):
    """Yield the tokens of each part with a loss."""
    assert all(label in (NO_LOSS, token) for token, label in zip(ids, labels, strict=True))
    for learned, part in groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] != NO_LOSS):
        if learned:
            yield tokenizer.decode([int(token) for token, _ in part])


def test_an_end_that_no_template_writes_is_what_begins_the_next_message_and_ends_generation():
    tokenizer = letters(shipped()["glm4moe"])
    ids, labels = encode_chat(tokenizer, chat_of({"messages": TURNS[:4]}, "rows:1"))
    runs = list(runs_of(tokenizer, ids, labels))
    assert runs == [f"\n<think></think>\nA{number}END<|user|>" for number in "12"]
    ends = HuggingFaceTokenizer("glm", tokenizer.eos_token_id, tokenizer).special_ids()["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(ends) == ["<eos>", "<|user|>", "<|observation|>"]
