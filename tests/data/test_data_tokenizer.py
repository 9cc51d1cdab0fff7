"""Tokenizers: bytes, and Hugging Face folders with and without EOS."""

import json
import subprocess
import sys

import numpy as np
import pytest
from testing.images import image_tokenizer
from tokenizers.processors import TemplateProcessing

from data.stores import save_words
from lengthwise.config import DataSource
from lengthwise.core.errors import ConfigError, DataError, Problems
from lengthwise.data import load_dataset, load_tokenizer


def save_tokenizer(folder, *, eos=None, adds_eos=False, bos=None, adds_bos=False):
    processor = None
    if adds_eos:
        processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    if adds_bos:
        processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 4)])
    words = ["<unk>", "<eos>", "hello", "world", "é"]
    return save_words(folder, words, processor=processor, eos_token=eos, bos_token=bos)


def test_tokenizer_bytes_is_utf8():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.name, tokenizer.eos_id) == ("bytes", None)
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert tokenizer.encode("a").dtype == np.int32
    assert tokenizer.encode_python(b"\xff\x00").tolist() == [255, 0]


@pytest.mark.parametrize("kind", ["bytes", "Hugging Face"])
def test_tokenizer_shows_ids_that_it_does_not_have(tmp_path, kind):
    tokenizer = load_tokenizer("bytes" if kind == "bytes" else save_tokenizer(tmp_path))
    known = tokenizer.encode("hello")
    assert tokenizer.decode(np.array([*known, 300, 999, *known], dtype=np.int32)) == "hello<300><999>hello"
    assert tokenizer.decode(tokenizer.encode("hello é")) == "hello é"
    assert tokenizer.decode(known[:0]) == ""


def test_tokenizer_with_eos_ends_a_text_once(tmp_path):
    without, plain, adding = (
        load_tokenizer(save_tokenizer(tmp_path / name, eos=eos, adds_eos=adds_eos))
        for name, eos, adds_eos in (("without", None, False), ("plain", "<eos>", False), ("adding", "<eos>", True))
    )
    assert (without.eos_id, without.encode("hello world").tolist()) == (None, [2, 3])
    for tokenizer in (plain, adding):
        assert (tokenizer.eos_id, tokenizer.encode("hello world").tolist()) == (1, [2, 3, 1])
    assert plain.encode("hello <eos>").tolist() == [2, 1]
    for twice in (lambda: adding.encode("hello <eos>"), lambda: adding.encode_pair("hello ", "<eos>")):
        with pytest.raises(ValueError, match="<eos> at its end, which the tokenizer adds, too"):
            twice()


ROWS_WITH_BOS = {
    "text": ['{"text": "é hello"}', '{"text": "hello é"}', '{"text": "é é"}'],
    "pair": [f'{{"prompt": "{each} ", "completion": "hello"}}' for each in ("é", "hello é", "é")],
    "chat": [f'{{"messages": [{{"role": "user", "content": "{each}"}}]}}' for each in ("é", "hello", "é é")],
}


@pytest.mark.parametrize("kind", ROWS_WITH_BOS)
def test_tokenizer_refuses_a_row_that_would_begin_with_two_bos(tmp_path, kind):
    (tmp_path / "rows.jsonl").write_text("\n".join(ROWS_WITH_BOS[kind]))
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "adds", bos="é", adds_bos=True))
    tokenizer.tokenizer.chat_template = "{{ bos_token }} {{ messages[0].content }}"
    assert tokenizer.encode("hello é").tolist() == [4, 2, 4]
    with pytest.raises(DataError, match=r"é at its start, which the .*, too .* \(and in 1 more rows\)"):
        load_dataset([DataSource(path=tmp_path / "rows.jsonl")], tokenizer=lambda: tokenizer, vocab_size=None)
    left = load_tokenizer(save_tokenizer(tmp_path / "leaves", bos="é"))
    assert left.encode("é hello").tolist() == [4, 2], "the text's own is the only one"


def test_tokenizer_decodes_python_by_its_declared_encoding(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    assert tokenizer.encode_python("# coding: latin-1\né".encode("latin-1")).tolist()[-1] == 4
    assert tokenizer.encode_python("\ufeffé".encode()).tolist() == [4]
    for lying in (b"# coding: nonsense\n", b"# coding: ascii\n\xff", b"\xff"):
        with pytest.raises(ValueError, match=r".+"):
            tokenizer.encode_python(lying)


def test_tokenizer_empty_encodings_and_lone_surrogates_are_bad_rows(tmp_path):
    tokenizer, path = load_tokenizer(save_tokenizer(tmp_path / "tokenizer")), tmp_path / "train.jsonl"
    path.write_text('{"text": "  "}\n{"text": "hello"}\n{"text": "hello \\ud800"}\n')
    with pytest.raises(Problems, match=r"(?s)without a single token.*surrogates not allowed"):
        load_dataset([DataSource(path=path)], tokenizer=lambda: tokenizer, vocab_size=5)
    source = DataSource(path=path, empty="skip", bad_rows="skip")
    assert load_dataset([source], tokenizer=lambda: tokenizer, vocab_size=5).ids.tolist() == [1]


def test_tokenizer_without_a_template_takes_that_of_the_processor(tmp_path):
    made = image_tokenizer()
    template, made.chat_template = made.chat_template, None
    made.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(str(tmp_path)).tokenizer.chat_template == template


@pytest.mark.parametrize("content", [None, "{", '{"tokenizer_class": "PreTrainedTokenizerFast"}'])
def test_tokenizer_that_cannot_load_is_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer_config.json").write_text(content)
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert caught.value.where == "tokenizer"


def test_tokenizer_runs_no_code_of_the_folder(tmp_path):
    mark = tmp_path / "ran"
    (tmp_path / "tok.py").write_text(f"open({str(mark)!r}, 'w')\nclass Tok: pass\n")
    config = {"auto_map": {"AutoTokenizer": ["tok.Tok", None]}, "tokenizer_class": "Tok"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError):
        load_tokenizer(str(tmp_path))
    assert not mark.exists()


@pytest.mark.parametrize("key", ["split_special_tokens", "some_rule_of_its_class"])
def test_tokenizer_of_another_argument_has_another_digest(tmp_path, key):
    folder = save_tokenizer(tmp_path / "one", eos="<eos>")
    digest = load_tokenizer(folder).digest()
    load_tokenizer(folder).save(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).digest() == digest, "its place does not matter"
    config = tmp_path / "saved/tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), key: True}))
    assert load_tokenizer(str(tmp_path / "saved")).digest() != digest


@pytest.mark.exhaustive
def test_tokenizer_needs_no_torch(tmp_path):
    ids = f"load_tokenizer({save_tokenizer(tmp_path, eos='<eos>')!r}).encode('hello').tolist()"
    code = (
        f"import sys; sys.modules['torch'] = None\nfrom lengthwise.data import load_tokenizer\nassert {ids} == [2, 1]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
