"""JSON-lines files and their rows: what is taken, and what is refused with file and line."""

import contextlib
import gzip
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.config import DataSource
from lengthwise.core.errors import DataError, LengthwiseError, Problems
from lengthwise.data import ByteTokenizer, load_dataset
from lengthwise.data.rows import RowParser


def no_tokenizer():
    raise AssertionError("rows of ids need no tokenizer")


def tokens_of(dataset, row, *, part=0):
    return dataset.read(row, 0, int(dataset.lengths[row]))[part]


def labels_of(dataset, row):
    return tokens_of(dataset, row, part=1)


@pytest.fixture
def load(tmp_path):
    def load_lines(*lines, vocab_size=None, end=b"\n", tokenizer=ByteTokenizer, **keys):
        path = tmp_path / "train.jsonl"
        path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + end)
        return load_dataset([DataSource(path=path, **keys)], tokenizer=tokenizer, vocab_size=vocab_size)

    return load_lines


def test_rows_of_text_are_bytes(load):
    dataset = load('{"text": "ab"}', '{"text": "é", "source": {"any": [1]}}')
    assert dataset.lengths.tolist() == [2, 2]
    assert tokens_of(dataset, 1).tolist() == [0xC3, 0xA9]
    assert labels_of(dataset, 0).tolist() == [97, 98]
    assert dataset.name(1) == "train.jsonl:2"
    assert load('{"text": "a"}\r', '{"text": "b"}', end=b"").lengths.tolist() == [1, 1]


def test_rows_labels_are_kept_beside_rows_without(load):
    dataset = load(
        '{"input_ids": [1, 2]}',
        '{"input_ids": [3, 4, 5], "labels": [-100, -100, 5]}',
        '{"input_ids": [6], "labels": [6]}',
        '{"input_ids": [7, 8], "labels": [7, -100]}',
        '{"text": "a"}',
    )
    assert [labels_of(dataset, row).tolist() for row in range(5)] == [[1, 2], [-100, -100, 5], [6], [7, -100], [97]]
    assert dataset.loss_tokens.tolist() == [1, 1, 0, 0, 0]
    assert dataset.ids.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("line", "place"),
    [
        (b'{"text": "a"', "broken JSON"),
        (b"\xef\xbb\xbf{}", "JSON"),
        (b"[" * 200_000, "JSON"),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "JSON"),
        (b"[1]", "an object"),
        (b'{"labels": [1]}', '"labels"'),
        (b'{"text": 5}', "a string"),
        (b'{"text": "\\ud800"}', "surrogates"),
        (b'{"text": "a", "input_ids": [1]}', '"text" and "input_ids"'),
        (b'{"input_ids": "1 2"}', '"input_ids"'),
        (b'{"input_ids": [1], "labels": null}', '"labels"'),
        (b" \t\r", "blank"),
        (b'{"text": "a\xff"}', "UTF-8; got another byte, at character 12"),
        (b'{"text": "a", "text": "b"}', 'the key "text" twice'),
        (b'{"text": "a", "score": NaN}', "NaN, which JSON does not have"),
        (b'{"txt": "a"}', 'got "txt"'),
        (b'{"text": "a", "labels": [1]}', '"text" and "labels" in one row'),
        (b'{"input_ids": [1, 2.0]}', "input_ids[1] = 2.0"),
        (b'{"input_ids": [true]}', "input_ids[0] = true"),
        (b'{"input_ids": [1, -100]}', "input_ids[1] = -100"),
        (b'{"input_ids": [1, 300]}', "input_ids[1] = 300"),
        (b'{"input_ids": [1, 99999999999999999999]}', "input_ids[1] = 99999999999999999999"),
        (b'{"input_ids": [1], "labels": [300]}', "labels[0] = 300"),
        (b'{"input_ids": [1, 2], "labels": [1]}', "labels"),
        (b'{"input_ids": [], "labels": [1]}', "0; got 1 labels"),
        (b'{"input_ids": [1, 2], "weights": 1}', "weights"),
        (b'{"input_ids": [1, 2], "weights": [1]}', "weights"),
        (b'{"input_ids": [1, 2], "weights": [1, -0.5]}', "weights[1] = -0.5"),
        (b'{"input_ids": [1, 2], "weights": [2e7, 0]}', "weights[0] = 20000000.0"),
        (b'{"input_ids": [1, 2], "weights": [true, 0]}', "got weights[0] = true"),
        (b'{"input_ids": [1, 2], "weights": [1e999, 0]}', "got weights[0] = Infinity"),
        (b'{"input_ids": [1], "labels": [1], "weights": [1]}', "weights"),
        (b'{"text": "a", "weights": [1]}', "weights"),
        (b'{"input_ids": []}', 'empty "input_ids"'),
        (b'{"text": ""}', 'empty "text"'),
        (b'{"prompt": "", "completion": ""}', '"prompt" and "completion"'),
    ],
)
def test_row_refused_names_file_and_line(load, line, place):
    with pytest.raises(DataError) as caught:
        load('{"text": "0"}', line, '{"text": "b"}', vocab_size=300)
    assert caught.value.where.endswith("train.jsonl:2")
    assert place in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_of_0_and_1_are_labels(load):
    ids, two = '"input_ids": [5, 6, 7, 8]', '{"input_ids": [5, 6]}'
    others = ('{"input_ids": [5, 6], "weights": [1, 1]}', '{"input_ids": [5, 6], "weights": null}')
    weighed = load(f'{{{ids}, "weights": [1, 0, 1.0, 0.0]}}', *others, '{"input_ids": [], "weights": []}', empty="skip")
    labelled = load(f'{{{ids}, "labels": [5, -100, 7, -100]}}', two, two, '{"input_ids": []}', empty="skip")
    assert weighed.loss_tokens.tolist() == [1, 1, 1, 0]  # the first weight is of a token that nothing predicts
    assert weighed.read(0, 0, 4)[1].tolist() == [5, -100, 7, -100]
    assert weighed.digest() == labelled.digest()


def test_weights_of_tokens_are_kept_as_labels_lie(load):
    weighed = load(
        '{"input_ids": [5, 6, 7, 8], "weights": [3, 0.5, 0, 2]}',
        '{"input_ids": [5, 6, 7]}',
        '{"input_ids": [5, 6, 7], "labels": [5, -100, 7]}',
    )
    assert weighed.loss_weights.tolist() == [2.5, 2, 1]
    assert weighed.loss_tokens.tolist() == [2, 2, 1]
    assert weighed.read(0, 0, 4)[1].tolist() == [5, 6, -100, 8]
    assert [weighed.read_weights(row, 1, 3).tolist() for row in range(3)] == [[0.5, 0], [1, 1], [0, 1]]
    others = load('{"input_ids": [5, 6, 7, 8], "weights": [3, 0.25, 0, 2]}', '{"input_ids": [5, 6, 7]}')
    plain = load('{"input_ids": [5, 6, 7, 8], "labels": [5, 6, -100, 8]}', '{"input_ids": [5, 6, 7]}')
    digests = [each.row_digests(0, 2).tolist() for each in (weighed, others, plain)]
    assert digests[0][1] == digests[1][1] == digests[2][1]
    assert len({tuple(each[0]) for each in digests}) == 3


IDS_ROW = {"input_ids": [1, 2, 3]}


@pytest.mark.parametrize(
    "columns",
    [
        {"label": [1, 2, 3]},
        {"attention_mask": [1, 1, 0]},
        {"attention_mask": "111"},
        {"lossMask": [1, 1, 1]},
        {"position_ids": [0, 1, 0]},
        {"token_type_ids": [0, 1, 1]},
        {"text": "a", "target": "b"},
    ],
    ids=str,
)
def test_row_column_like_labels_or_a_mask_is_refused_by_name(load, columns):
    row = columns if "text" in columns else {**IDS_ROW, **columns}
    name = list(columns)[-1]
    with pytest.raises(DataError, match=f'-100 where there is no loss.*got "{name}".*into `labels`'):
        load(json.dumps(row))


@pytest.mark.parametrize(
    "row",
    [
        {**IDS_ROW, "attention_mask": [1, 1, 1], "token_type_ids": [0, 0, 0], "position_ids": [0, 1, 2]},
        {**IDS_ROW, "loss_mask": None, "id": 5, "masked": True, "source": "x"},
        {"text": "a", "label": 1, "weight": 0.5},
    ],
    ids=str,
)
def test_row_column_that_changes_nothing_is_passed_over(load, row):
    assert load(json.dumps(row)).num_rows == 1


def test_rows_refused_alike_are_one_line_with_their_count(load):
    with pytest.raises(DataError) as caught:
        load(*[json.dumps({"messages": [{"role": "user", "content": str(n)}]}) for n in range(30)])
    assert caught.value.where.endswith("train.jsonl:1")
    assert "(and in 29 more rows)" in str(caught.value)
    assert "chat template" in caught.value.remedy
    assert "\n" not in str(caught.value)


ZIP, UTF_16, ARRAY = b"PK\x03\x04" + b"\n\xe4" * 50, '{"text": "a"}'.encode("utf-16"), b'[\n{"text": "a"}\n]'


@pytest.mark.parametrize("raw", [b"text\na\n", ZIP, UTF_16, b"PAR0", ARRAY])
def test_file_of_another_kind_is_one_line_that_names_it(tmp_path, raw):
    path = tmp_path / "train.dat"
    path.write_bytes(raw)
    said = r"JSON lines .*, Parquet, Arrow or .csv; got a file that begins with"
    with pytest.raises(DataError, match=said) as caught:
        load_dataset([DataSource(path=path)], tokenizer=ByteTokenizer, vocab_size=None)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(("ending", "between", "packed"), [("csv", ",", True), ("tsv", "\t", False)])
def test_a_csv_has_rows_of_text_of_which_nothing_is_a_number_or_null(tmp_path, ending, between, packed):
    raw = f'text{between}id\n"a, b\nc"{between}007\nNA{between}8\n12{between}\n'.encode()
    path = tmp_path / f"train.{ending}{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(raw) if packed else raw)
    dataset = load_dataset([DataSource(path=path)], tokenizer=ByteTokenizer, vocab_size=None)
    assert [bytes(tokens_of(dataset, row).tolist()) for row in range(3)] == [b"a, b\nc", b"NA", b"12"]


@pytest.mark.parametrize(("name", "read", "row"), [("a.txt", b'{"text": "a"}\n', "a.txt"), ("a.dat", b"a", "a.dat:1")])
def test_a_file_of_text_is_a_document_and_rows_have_any_other_name(tmp_path, name, read, row):
    (tmp_path / name).write_text('{"text": "a"}\n')
    dataset = load_dataset([DataSource(path=tmp_path / name)], tokenizer=ByteTokenizer, vocab_size=None)
    assert (bytes(tokens_of(dataset, 0).tolist()), dataset.name(0)) == (read, row)


def test_row_ids_are_those_of_the_model_and_fit_int32(load):
    assert tokens_of(load('{"input_ids": [2147483647]}'), 0).tolist() == [2**31 - 1]
    with pytest.raises(DataError, match="2147483648"):
        load('{"input_ids": [2147483648]}')
    with pytest.raises(DataError, match="id 122 from tokenizer bytes"):
        load('{"text": "az"}', vocab_size=122)


def test_rows_empty_skip_keeps_the_row_numbers(load):
    dataset = load("", '{"text": "a"}', '{"text": ""}', '{"input_ids": []}', '{"text": "b"}', empty="skip")
    assert dataset.ids.tolist() == [1, 4]
    assert dataset.lengths.tolist() == [0, 1, 0, 0, 1]
    assert dataset.skipped == {"empty": 3}
    assert dataset.name(4) == "train.jsonl:5"
    assert tokens_of(dataset, 0).tolist() == []
    assert dataset.loss_tokens[0] == 0


def test_rows_too_long_stop_with_the_keys_to_change_or_are_left_out(load):
    with pytest.raises(DataError, match=r"data\.0\.max_tokens.*data\.0\.too_long: skip") as caught:
        load('{"text": "abc"}', '{"text": "abcd"}', max_tokens=3)
    assert caught.value.where.endswith(":2")
    dataset = load('{"text": "abcd"}', '{"text": "abc"}', '{"input_ids": [1, 2, 3, 4]}', max_tokens=3, too_long="skip")
    assert dataset.ids.tolist() == [1]
    assert dataset.skipped == {"too long": 2}
    with pytest.raises(DataError, match="1 too long, 1 empty"):
        load('{"text": "abcd"}', "", max_tokens=3, too_long="skip", empty="skip")
    with pytest.raises(DataError, match=r"left out: 2 bad; the first, .*train\.jsonl:1: expected .*; got "):
        load('{"instruction": "a"}', '{"text": 3}', bad_rows="skip")


def test_rows_bad_ones_of_all_sources_come_together_first_twenty_and_a_count(tmp_path):
    for name, text in (("a", "{x\n"), ("b", ""), ("d", "".join(f'{{"input_ids": [-{n}]}}\n' for n in range(1, 31)))):
        (tmp_path / f"{name}.jsonl").write_text(text)
    sources = [DataSource(path=tmp_path / f"{name}.jsonl") for name in "abcd"]
    with pytest.raises(Problems) as caught:
        load_dataset(sources, tokenizer=ByteTokenizer, vocab_size=None)
    lines = str(caught.value).splitlines()
    found = [os.path.basename(problem.where) for problem in caught.value.problems]
    assert found[:20] == ["a.jsonl:1", "b.jsonl", "c.jsonl", *(f"d.jsonl:{row}" for row in range(1, 18))]
    assert len(lines) == 21
    assert "got 33, the first 20 above" in lines[20]
    assert caught.value.exit_status == 2


IDS = st.lists(st.integers(0, 299), min_size=1, max_size=20)


@given(rows=st.lists(st.tuples(IDS, st.booleans()), min_size=1, max_size=20))
def test_rows_come_back_as_written(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "train.jsonl"
    written = [{"input_ids": ids, **({"labels": [-100, *ids[1:]]} if own else {})} for ids, own in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in written))
    dataset = load_dataset([DataSource(path=path)], tokenizer=no_tokenizer, vocab_size=300)
    assert dataset.num_rows == len(rows)
    assert sum(len(ids) for ids, _ in rows) == dataset.lengths.sum()
    for row, values in enumerate(written):
        assert tokens_of(dataset, row).tolist() == values["input_ids"]
        assert labels_of(dataset, row).tolist() == values.get("labels", values["input_ids"])
        assert dataset.loss_tokens[row] == len(values["input_ids"]) - 1


@given(line=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_rows_any_line_is_a_row_or_an_error_of_ours(line):
    with contextlib.suppress(LengthwiseError):
        RowParser(None).parse(line.decode("utf-8", "replace"), where="f:1")


def parse(row):
    return RowParser(None).parse(json.dumps(row), where="r:1")


def take(row):
    return RowParser(None).take(row, where="r:1")


def both_ways(row):
    """Return a row's chat, which is the same from a line and from a table."""
    assert parse(row).chat == take(row).chat
    return parse(row).chat


def said(chat):
    return [(message["role"], message["content"]) for message in chat.messages]


def user(*content):
    return {"messages": [{"role": "user", "content": list(content)}]}


ANSWERED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ASKED_AND_ANSWERED = [("user", "a"), ("assistant", "b")]
SHARED = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
FORMS = {
    "messages": {"messages": ANSWERED},
    "completion": {"prompt": ANSWERED[:1], "completion": ANSWERED[1:]},
    "sharegpt": {"conversations": SHARED},
    "alpaca": {"instruction": "a", "output": "b"},
}


@pytest.mark.parametrize("form", FORMS)
def test_columns_beside_every_form_of_chat_are_part_of_its_prompt(form):
    more = {"system": "s", "tools": '[{"name": "f"}]', "documents": [{"text": "d"}], "chat_template_kwargs": {"n": 1}}
    chat = both_ways({**FORMS[form], **more, "history": [], "functions": None, "system_prompt": "", "text": None})
    assert said(chat) == [("system", "s"), *ASKED_AND_ANSWERED]
    assert chat.context == (2 if form == "completion" else 0)
    assert chat.tools == ({"name": "f"},)
    assert chat.values == {"n": 1, "documents": [{"text": "d"}]}


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"instruction": "a", "input": "b", "output": "c"}, [("user", "a\n\nb"), ("assistant", "c")]),
        ({"instruction": "", "input": "a", "output": "b", "messages": None}, ASKED_AND_ANSWERED),
        ({**FORMS["alpaca"], "history": [["x", "y"]]}, [("user", "x"), ("assistant", "y"), *ASKED_AND_ANSWERED]),
        ({"conversations": ANSWERED}, ASKED_AND_ANSWERED),
        ({"messages": [{"role": "system", "content": "s"}, *ANSWERED], "system": "s"}, [("system", "s")]),
        (user("What is ", {"type": "text", "text": "a ring?", "image": None}, "!"), [("user", "What is a ring?!")]),
    ],
    ids=["input", "input alone", "history", "messages by another name", "a system prompt twice", "parts of text"],
)
def test_rows_of_other_forms_are_chats(row, turns):
    assert said(both_ways(row))[: len(turns)] == turns


def test_a_prompt_that_is_there_already_leaves_columns_to_the_user():
    assert parse({"text": "a", "system": "s", "tools": "x"}).text == "a"


def test_null_is_nothing_in_lines_and_tables_but_in_json_text_it_stays():
    call = {"name": "f", "arguments": {"a": 1, "b": None}}
    messages = [{"role": "user"}, {"role": "assistant", "content": None, "tool_calls": [call], "name": None}]
    chat = both_ways({"text": None, "messages": messages, "tools": [{"p": {"x": None, "y": [2]}}], "completion": None})
    assert chat.tools == ({"p": {"y": [2]}},)
    calls = [{"name": "f", "arguments": {"a": 1}}]
    assert chat.messages == ({"role": "user", "content": ""}, {"role": "assistant", "content": "", "tool_calls": calls})
    call["arguments"] = '{"a": null}'
    chat = both_ways({"messages": messages, "tools": '[{"x": null}]'})
    assert chat.tools == ({"x": None},)
    assert chat.messages[1]["tool_calls"] == [{"name": "f", "arguments": {"a": None}}]
    for nothing in (None, [], "", "[]"):
        chat = both_ways({"messages": ANSWERED, "tools": nothing, "documents": nothing})
        assert (chat.tools, chat.values) == (None, {})


@pytest.mark.parametrize("given", [{}, {"arguments": None}, {"arguments": ""}], ids=str)
def test_a_call_without_arguments_has_none_of_them(given):
    calls, without = [{"type": "function", "function": {"name": "f", **given}}], {"name": "f", "arguments": {}}
    for written in (calls, json.dumps(calls)):
        found = both_ways({"messages": [{"role": "assistant", "tool_calls": written}]}).messages[0]["tool_calls"]
        assert found == [{"type": "function", "function": without}]


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ({"messages": ANSWERED, "history": [["x", "y"]]}, '"history", which would be ignored'),
        ({"conversations": SHARED, "functions": [{"name": "f"}]}, '"functions", which would be ignored'),
        ({"prompt": "a", "completion": "b", "system": "s"}, '"system", which would be ignored'),
        ({"messages": [{"role": "system", "content": "t"}, *ANSWERED], "system": "s"}, '"system" beside another'),
        ({"messages": ANSWERED, "tools": json.loads("[" * 700 + "]" * 700)}, "nesting too deep"),
        ({"messages": ANSWERED, "system": ["s"]}, '"system" to be text'),
        ({"messages": ANSWERED, "tools": "[1"}, '"tools" to be a list, or JSON text of one; got the text'),
        ({"messages": ANSWERED, "tools": '{"a": 1}'}, '"tools" to be a list, or JSON text of one'),
        ({"messages": ANSWERED, "chat_template_kwargs": {"tools": [1]}}, '"tools" in it'),
        ({**FORMS["alpaca"], "history": [["x"]]}, '"history" to be a list of pairs'),
        ({"instruction": "a"}, '"output" beside "instruction"'),
        ({"messages": [*ANSWERED, {"role": "assistant", "content": None}]}, r"messages\[2\] with none"),
        ({"instruction": "a", "output": None}, 'an empty "output".*bad_rows: skip'),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "x"}]}]}, '"arguments" of a'),
        (user({"type": "image_url", "image_url": {"url": "https://a/b.png"}}), "paths of files"),
        (user({"type": "input_audio"}), "audio is not"),
        (user({"type": "card"}), r'content\[0\] of type "card"'),
        (user({"text": "a"}, {"type": "text", "text": 3}), "with 3"),
        ({"messages": "a"}, '"messages"'),
        ({"messages": [{"content": "a"}]}, r"messages\[0\].*role"),
        ({"messages": [{"role": "user", "content": 3}]}, r"\"content\" of messages\[0\]"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0}]}, r"\"weight\" of messages\[0\]"),
        ({"messages": [{"role": "assistant", "content": "a", "train": False}]}, r"\"train\" of messages\[0\]"),
        ({"messages": [{"role": "gpt", "content": "b"}]}, r"assistant, .*got \"gpt\" of messages\[0\]"),
        ({"messages": ANSWERED, "labels": [1]}, '"labels"'),
        ({"messages": ANSWERED, "tools": {"a": 1}}, '"tools"'),
        ({"messages": ANSWERED, "completion": "b"}, '"messages" and "completion"'),
        ({"messages": ANSWERED, "images": [""]}, r'"images"\[0\]'),
        (user({"type": "image"}), "1 part of type image without"),
        ({"image": "x.png", "prompt": "a", "completion": "b"}, '"image"'),
        ({"input_ids": [1], "pixel_values": [[0.5]]}, '"pixel_values"'),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, '"chosen"'),
        ({"prompt": "a"}, '"completion"'),
        ({"prompt": ANSWERED[:1], "completion": "b"}, '"prompt"'),
        ({"conversations": [{"from": "alien", "value": "a"}]}, '"alien" of messages'),
        ({"instruction": "a", "output": ["b"]}, '"instruction", "input", "output"'),
    ],
    ids=lambda each: str(each)[:60],
)
def test_what_a_chat_cannot_take_is_refused_by_name(row, place):
    for read in (parse, take):
        with pytest.raises(DataError, match=place):
            read(row)
