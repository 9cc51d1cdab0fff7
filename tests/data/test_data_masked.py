"""Chats and prompts with completions: which tokens have a loss, and what is refused."""

import json

import pytest
from transformers import AutoTokenizer

from data.stores import save_words
from lengthwise.config import DataSource
from lengthwise.core.errors import DataError
from lengthwise.data import NO_LOSS, ByteTokenizer, load_dataset, load_tokenizer

PLAIN = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }} <end> {% endgeneration %}{% else %}{{ m.content }} <end> {% endif %}{% endfor %}"
)
COUNTING = "{{ messages | length }} " + PLAIN  # what it writes first depends on what follows
WORDS = ["<unk>", "<eos>", "<user>", "<assistant>", "<tool>", "<system>", "<end>", "a", "b", "c", "d"]
CHAT = [("system", "a"), ("user", "b"), ("assistant", "c"), ("tool", "d"), ("assistant", "a b")]


def messages(*turns):
    return [{"role": role, "content": content} for role, content in turns]


@pytest.fixture
def load(tmp_path):
    def load_rows(*rows, template=None, eos=None):
        name = save_words(tmp_path / "tokenizer", WORDS, template=template, eos_token=eos)
        return load_rows_by(tmp_path, rows, lambda: load_tokenizer(name))

    return load_rows


def merging_tokenizer(folder):
    """Save a tokenizer that makes one token of `ab`, and one of a space with the letter after it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<eos>", "a", "b", "c", " ", "ab", " b", " c"])}
    inner = Tokenizer(models.BPE(vocabulary, [("a", "b"), (" ", "b"), (" ", "c")]))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>").save_pretrained(folder)
    return str(folder)


def load_rows_by(folder, rows, tokenizer):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_dataset([DataSource(path=folder / "rows.jsonl")], tokenizer=tokenizer, vocab_size=None)


def told(dataset, row=0):
    """Return the words of a row, and those with a loss."""
    ids, labels = dataset.read(row, 0, int(dataset.lengths[row]))
    assert all(label in (NO_LOSS, token) for token, label in zip(ids, labels, strict=True))
    return " ".join(WORDS[i] for i in ids), " ".join(WORDS[i] for i in labels if i != NO_LOSS)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_chat_has_a_loss_on_turns_of_the_assistant_alone(load, template):
    text, learned = told(load({"messages": messages(*CHAT)}, template=template))
    assert text == "<system> a <end> <user> b <end> <assistant> c <end> <tool> d <end> <assistant> a b <end>"
    assert learned == "c <end> a b <end>"
    said_anyway = [{**each, "train": each["role"] == "assistant"} for each in messages(*CHAT)]
    assert told(load({"messages": said_anyway}, template=template)) == (text, learned)
    completed = {"prompt": messages(*CHAT[:4]), "completion": messages(*CHAT[4:])}
    assert told(load(completed, template=template)) == (text, "a b <end>")


def test_chat_without_an_assistant_has_no_loss_and_tools_reach_the_template(load):
    row = {"messages": messages(("user", "a")), "tools": [{"name": "d"}]}
    with pytest.warns(UserWarning, match="leaves out the tools"):
        dataset = load(row, template=PLAIN)
    assert (dataset.lengths.tolist(), dataset.loss_tokens.tolist()) == ([3], [0])
    assert told(load(row, template="{{ tools[0].name }} " + PLAIN))[0][0] == "d"


REWRITTEN = PLAIN.replace("{{ m.content }}", "{% if m.role == 'assistant' and loop.last %}d {% endif %}{{ m.content }}")
DROPPED = REWRITTEN.replace("<{{ m.role }}>", "{% if m.role != 'assistant' or loop.last %}<{{ m.role }}>").replace(
    "{% endfor %}", "{% endif %}{% endfor %}"
)
RENAMED = PLAIN.replace("<{{ m.role }}>", "<{{ 'system' if m.role == 'assistant' and not loop.last else m.role }}>")


def test_turns_of_a_template_that_writes_earlier_ones_otherwise_are_found_in_the_whole_text(load):
    text, learned = told(load({"messages": messages(*CHAT)}, template=REWRITTEN))
    assert text == "<system> a <end> <user> b <end> <assistant> c <end> <tool> d <end> <assistant> d a b <end>"
    assert learned == "c <end> d a b <end>"
    row = {"prompt": messages(*CHAT[:4]), "completion": messages(*CHAT[4:])}
    assert told(load(row, template=REWRITTEN))[1] == "d a b <end>"
    assert told(load({"messages": messages(*CHAT)}, template=COUNTING))[1] == "c <end> a b <end>"


def test_a_turn_that_is_not_found_is_refused_with_a_way_out(load):
    with pytest.raises(DataError, match=r"leaves out message 3 \(take it out of the row\)"):
        load({"messages": messages(*CHAT)}, template=DROPPED)
    assert told(load({"messages": messages(*CHAT[:2], *CHAT[3:])}, template=DROPPED))[1] == "d a b <end>"
    with pytest.raises(DataError, match=r"message 3 is not found .* mark the assistant's text in the template"):
        load({"messages": messages(*CHAT)}, template=RENAMED)
    marks = RENAMED.replace(
        "{{ m.content }} <end>",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }} <end>"
        "{% endgeneration %}{% else %}{{ m.content }} <end>{% endif %}",
    )
    assert told(load({"messages": messages(*CHAT)}, template=marks))[1] == "c <end> a b <end>"


def test_a_token_across_the_start_of_a_mark_has_a_loss_as_in_transformers(tmp_path):
    name = merging_tokenizer(tmp_path / "merging")
    template = "{% for m in messages %}a{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    (tmp_path / "merging" / "chat_template.jinja").write_text(template)
    with pytest.warns(UserWarning, match="leaves out the end of turns of the assistant"):
        dataset = load_rows_by(tmp_path, [{"messages": messages(("assistant", "bc"))}], lambda: load_tokenizer(name))
    assert [each.tolist() for each in dataset.read(0, 0, 2)] == [[5, 3], [5, 3]]
    theirs = AutoTokenizer.from_pretrained(name).apply_chat_template(
        messages(("assistant", "bc")), return_assistant_tokens_mask=True, return_dict=True
    )
    assert theirs["assistant_masks"] == [1, 1]


def test_chat_without_a_template_or_refused_by_it_is_one_line(load, tmp_path):
    with pytest.raises(DataError, match="without a chat template"):
        load({"messages": messages(*CHAT)})
    with pytest.raises(DataError, match="bytes, which has no chat template"):
        load_rows_by(tmp_path, [{"messages": messages(*CHAT)}], ByteTokenizer)
    with pytest.raises(DataError, match="the template refuses: TemplateError: no tools"):
        load({"messages": messages(*CHAT)}, template="{{ raise_exception('no tools') }}")


def test_pair_has_a_loss_on_the_completion_and_the_end(load):
    row = {"prompt": "a b ", "completion": "c d"}
    assert told(load(row)) == ("a b c d", "c d")
    assert told(load(row, eos="<eos>")) == ("a b c d <eos>", "c d <eos>")


def test_pair_with_a_token_across_its_border_is_refused_by_row(tmp_path):
    """Nothing of such a token would be learned."""
    tokenizer = load_tokenizer(merging_tokenizer(tmp_path / "tokenizer"))
    row = {"prompt": "a", "completion": " b"}
    assert load_rows_by(tmp_path, [row], lambda: tokenizer).read(0, 0, 9)[1].tolist() == [NO_LOSS, 6, 0]
    for across in ({"prompt": "a", "completion": "b"}, {"prompt": "a ", "completion": "b"}):
        with pytest.raises(DataError, match="a token across the end of the prompt") as caught:
            load_rows_by(tmp_path, [row, across], lambda: tokenizer)
        assert caught.value.where.endswith("rows.jsonl:2")
