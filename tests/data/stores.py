"""Sources of every kind with ugly lengths, and folders prepared of them in small parts."""

import json
import os
import signal
from pathlib import Path
from unittest.mock import patch

from hypothesis import strategies as st

from lengthwise.config import DataSource
from lengthwise.data import ByteTokenizer, load_dataset
from lengthwise.data.digests import row_digest
from lengthwise.data.prepare import prepare_folder, to_prepare

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
ROW = st.one_of(
    TEXT.map(lambda text: {"text": text}),
    st.sampled_from([1, 2, 3, 7, 97, 300]).map(lambda length: {"text": "x" * length}),
    st.lists(st.integers(0, 255), max_size=9).map(lambda ids: {"input_ids": ids}),
    st.lists(st.tuples(st.integers(0, 255), st.sampled_from([-100, 5])), max_size=9).map(
        lambda rows: {"input_ids": [row[0] for row in rows], "labels": [row[1] for row in rows]}
    ),
    st.lists(st.tuples(st.integers(0, 255), st.sampled_from([0, 1, 1.0, 0.1, 2.5, 1e6])), max_size=9).map(
        lambda rows: {"input_ids": [row[0] for row in rows], "weights": [row[1] for row in rows]}
    ),
    st.fixed_dictionaries({"prompt": TEXT, "completion": TEXT}),
)
FILES = st.lists(st.lists(ROW, min_size=1, max_size=20), min_size=1, max_size=3)
DOCUMENTS = st.lists(TEXT.map(lambda text: text.replace("\0", "")), max_size=6)  # with it, a file is no text


def write_sources(folder: Path, files, documents=(), **settings) -> list[DataSource]:
    """Write files of rows, and a folder of documents where there are any; return sources that leave empty rows out."""
    settings = {"empty": "skip", **settings}
    folder.mkdir(exist_ok=True)
    sources = []
    for number, rows in enumerate(files):
        path = folder / f"rows-{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        sources.append(DataSource(path=path, **settings))
    if documents:
        (folder / "documents").mkdir()
        for number, text in enumerate(documents):
            (folder / "documents" / f"{number}.txt").write_text(text, encoding="utf-8")
        sources.insert(1, DataSource(path=folder / "documents", **settings))
    return sources


def prepare(sources, out, *, name="bytes", tokenizer=ByteTokenizer, keys=None, vocab_size=None, **options):
    """Prepare, in this process unless `processes` says otherwise; return what was prepared, and if it was there."""
    plan = to_prepare(sources, tokenizer_name=name, tokenizer=tokenizer, keys=keys, vocab_size=vocab_size)
    with patch("lengthwise.data.prepare.ROWS", 3):
        return prepare_folder(plan, out, **options)


def load(*sources, tokenizer=ByteTokenizer, vocab_size=256, **keys):
    """Load sources, or paths of them."""
    sources = [each if isinstance(each, DataSource) else DataSource(path=each, **keys) for each in sources]
    return load_dataset(sources, tokenizer=tokenizer, vocab_size=vocab_size)


def content(dataset):
    """Return all that a dataset tells, as plain values."""
    rows = range(len(dataset.lengths))
    read = [dataset.read(row, 0, int(dataset.lengths[row])) for row in rows]
    return {
        "lengths": dataset.lengths.tolist(),
        "losses": dataset.loss_tokens.tolist(),
        "loss_weights": dataset.loss_weights.tolist(),
        "weights": [weights_of(dataset, row, 0, int(dataset.lengths[row])) for row in rows],
        "weighed": {dataset.read_weights(row, 0, 1) is not None for row in rows},  # all rows alike
        "ids": dataset.ids.tolist(),
        "rows": [[each.tolist() for each in pair] for pair in read],
        "names": [dataset.name(row) for row in rows],
        "skipped": dict(dataset.skipped),
        "digest": dataset.digest(),
        "digests": dataset.row_digests(0, len(rows)).tolist(),
    }


def weights_of(dataset, row, start, stop):
    """Return what tokens of a row weigh, by labels alone where there is no more."""
    found = dataset.read_weights(row, start, stop)
    labels = dataset.read(row, start, stop)[1]
    return [float(label != -100) for label in labels] if found is None else found.tolist()


def killed_in_one_worker(marker):
    """Return what `row_digest` is, but the first other process that calls it is killed."""
    parent = os.getpid()

    def killed(*row):
        if os.getpid() != parent and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return row_digest(*row)

    return killed


def save_words(folder: Path, words, *, template=None, processor=None, **special) -> str:
    """Save a tokenizer of these words, the first for unknown ones; return its folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if processor is not None:
        inner.post_processor = processor
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=words[0], **special)
    made.add_tokens([word for word in words if word == "<end>"], special_tokens=True)
    made.chat_template = template
    made.save_pretrained(folder)
    return str(folder)
