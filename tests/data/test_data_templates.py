"""What chat templates do with a chat: no null becomes text, nothing is left out without a word."""

import re
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

from data.stores import save_words
from lengthwise.data import NO_LOSS, load_tokenizer
from lengthwise.data.messages import chat_of
from lengthwise.data.templates import Template

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
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=str)
def test_a_call_without_content_is_the_call_alone_by_every_template(encode, form, content):
    text, learned = encode(
        {"messages": [ASKED, {**CALL, **content}, {"role": "tool", "content": "c"}, ANSWER]}, FORMS[form]
    )
    assert text == '<user> a <end> <assistant> f {"x": "y"} <end> <tool> c <end> <assistant> b <end>'
    assert learned == 'f {"x": "y"} <end> b <end>'


@pytest.mark.parametrize("form", FORMS)
def test_null_content_without_calls_is_no_text(encode, form):
    text, _ = encode({"messages": [{"role": "system", "content": None}, {"role": "user"}, ANSWER]}, FORMS[form])
    assert text == "<system> <end> <user> <end> <assistant> b <end>"


def test_the_word_none_of_a_row_stays(encode):
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": "None"}}}],
    }
    rows = [{"role": "user", "content": "None"}, call, {"role": "tool", "content": "null"}, ANSWER]
    for source in (NOT_TESTED, IF_NULL):
        text, _ = encode({"messages": rows}, source)
        assert text == '<user> None <end> <assistant> f {"x": "None"} <end> <tool> null <end> <assistant> b <end>'


def test_a_template_of_parts_alone_is_given_parts_whatever_else_it_leaves_out(encode):
    asked = {"role": "user", "content": "None"}
    assert encode({"messages": [asked, {**ANSWER, "content": "null"}]}, OF_PARTS)[1] == "null <end>"
    with pytest.warns(UserWarning, match="leaves out a tool call"):
        text, _ = encode({"messages": [asked, {**CALL, "content": "b"}]}, OF_PARTS.replace(CALLS, ""))
    assert text == "<user> None <end> <assistant> b <end>"


LAST_THOUGHT = template(
    "{% if loop.last and m.reasoning_content %}<think> {{ m.reasoning_content }} </think> {% endif %}{{ m.content }} "
)
THOUGHTS = [ASKED, {**ANSWER, "reasoning_content": "c"}, ASKED, {**ANSWER, "reasoning_content": "d"}]


@pytest.mark.parametrize(
    ("row", "source", "said"),
    [
        ({"messages": THOUGHTS}, LAST_THOUGHT, "the reasoning of assistant messages (message 2)"),
        (
            {"messages": [ASKED, {**CALL, "content": "b"}]},
            WITHOUT_CALLS,
            "a tool call of assistant messages (message 2)",
        ),
        ({"messages": [ASKED, ANSWER], "tools": [{"name": "f"}]}, NOT_TESTED, "the tools (column tools)"),
        (
            {"messages": [ASKED, ANSWER], "chat_template_kwargs": {"think": False}},
            NOT_TESTED,
            "think (in chat_template_kwargs)",
        ),
        (
            {"messages": [ASKED, ANSWER], "system": "s"},
            template("{{ m.content if m.role != 'system' }} "),
            "the content of system messages (message 1)",
        ),
    ],
    ids=["reasoning", "calls", "tools", "values", "system"],
)
def test_what_a_template_leaves_out_is_said_once(encode, row, source, said):
    with pytest.warns(UserWarning, match="leaves out") as caught:
        encode(row, source)
    assert [str(each.message)[:30] for each in caught] == ["rows:1: the chat template of /"]
    assert said in str(caught[0].message)


@pytest.mark.parametrize(
    ("row", "source", "said"),
    [
        ({"messages": [ASKED, CALL]}, EMPTY_MARKS, "an empty turn: .* leaves out a tool call of message 2"),
        ({"messages": [ASKED, CALL]}, WITHOUT_CALLS, "an empty turn: .* leaves out a tool call of message 2"),
        ({"messages": [ASKED, ANSWER]}, template("{{ m.text }} "), "an empty turn: .* the content of message 2"),
        (
            {"messages": [ASKED, ANSWER], "documents": [{"text": "d"}]},
            NOT_TESTED,
            '"documents", which the chat',
        ),
        (
            {"messages": [ASKED, ANSWER], "chat_template_kwargs": {"notes": "d"}},
            NOT_TESTED,
            '"notes", which the chat template',
        ),
        (
            {"messages": [ASKED, ANSWER]},
            template("{{ m.content }} ", prompt="<assistant> <think> "),
            "message 2 is not found: its prompt for a generation ends in '<think> ', and the turn does not begin so",
        ),
    ],
    ids=["marked call", "call", "content", "documents", "values", "think"],
)
def test_a_turn_of_which_nothing_is_learned_is_refused_with_its_reason(encode, row, source, said):
    with pytest.raises(ValueError, match=said):
        encode(row, source)


def test_values_of_a_row_reach_the_template(encode):
    source = "{% if c %}{{ c }} {% endif %}{{ documents[0].text }} " + NOT_TESTED
    row = {"messages": [ASKED, ANSWER], "documents": [{"text": "d"}], "chat_template_kwargs": '{"c": "c"}'}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert encode(row, source)[0].startswith("c d <user>")


def test_no_template_of_a_family_writes_null(tmp_path):
    found = find_spec("trl")
    assert found is not None
    assert found.origin is not None
    paths = (Path(found.origin).parent / "chat_templates").glob("*.jinja")
    sources = {path.stem: path.read_text() for path in paths if not path.stem.endswith("_training")}
    words = ["<unk>", "None", "null", "dry"]
    tokenizer = load_tokenizer(save_words(tmp_path / "tokenizer", words, bos_token="<unk>", eos_token="<unk>"))
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"x": "y"}}}
    turns = [ASKED, {**CALL, "content": None, "tool_calls": [call]}, {"role": "tool", "content": "c"}, ANSWER]
    chat, rendered = chat_of({"messages": turns, "tools": [{"type": "function", "function": TOOL}]}, "rows:1"), 0
    for name, source in sources.items():
        tokenizer.tokenizer.chat_template = source
        try:
            text = Template.of(tokenizer.tokenizer, chat).fitted(chat.messages).text
        except ValueError:
            continue
        rendered += 1
        assert not ({"None", "null"} & set(re.findall(r"\w+", text))), name
    assert rendered > 20
