"""Batches of remote rows are those of the same rows read at the start, whatever is cached, lost or started again."""

import json
import time
from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.shards import remote
from data.stores import DOCUMENTS, FILES, prepare, weights_of, write_sources
from data.test_data_masked import CHAT, WORDS, messages
from data.test_data_tables import write
from lengthwise.config import DataSource, GlobalBatch
from lengthwise.core.errors import DataError
from lengthwise.data import Batches, ByteTokenizer, load_dataset, load_tokenizer
from lengthwise.data.numbered import numbered
from lengthwise.data.shard import Shard
from lengthwise.data.sources import Listing
from lengthwise.engine.batch import StepBatch
from lengthwise.program import Segment
from properties import costly

SKIPS = {"max_tokens": 90, "too_long": "skip", "empty": "skip", "bad_rows": "skip"}
SIZES = st.one_of(
    st.integers(1, 9).map(lambda number: GlobalBatch(sequences=number)),
    st.sampled_from([1, 40, 200]).map(lambda number: GlobalBatch(tokens=number)),
)


@contextmanager
def served(sources, *, checks_losses=True, **changes):
    dataset, clients = remote(sources, **changes)
    if not checks_losses:
        dataset._check_losses = lambda ids: None
    yield dataset, clients
    for each in clients:
        each.shard.close()


def seen(batch):
    """All that a step takes of a batch: its numbers, and each sequence's tokens, labels and weights."""
    whole = [Segment(sequence=number, start=0, stop=length) for number, length in enumerate(batch.lengths)]
    batch.read_ahead(whole)
    ids, positions, labels = (each.tolist() for each in batch.tensors(whole))
    data, weights = batch.dataset, batch.weights(whole)
    rows = [weights_of(data, row, 0, int(data.lengths[row])) for row in batch.ids]
    numbers = batch.lengths, batch.loss_tokens, batch.loss_weight
    return batch.ids, numbers, ids, positions, labels, rows, None if weights is None else weights.tolist()


def batches_of(dataset, size, steps, start=(0, 0), seed=0):
    if isinstance(dataset, SimpleNamespace) or hasattr(dataset, "attach"):
        found = dataset.batches(size, start)
    else:
        found = Batches(dataset, SimpleNamespace(seed=seed, steps=steps, epochs=None, global_batch=size))
    return [StepBatch(dataset, each.ids, each.end) for each in islice(found, steps)]


def local(sources, tokenizer=ByteTokenizer, vocab_size=256):
    return load_dataset(sources, tokenizer=tokenizer, vocab_size=vocab_size)


@given(
    files=FILES,
    documents=DOCUMENTS,
    size=SIZES,
    seed=st.integers(0, 9),
    actors=st.integers(1, 3),
    cache_bytes=st.sampled_from([0, 4000, 1 << 20]),
    ends_after=st.sampled_from([None, 1, 5]),
)
@costly
def test_batches_are_those_of_the_rows_read_at_the_start(
    tmp_path_factory, files, documents, size, seed, actors, cache_bytes, ends_after
):
    sources = write_sources(tmp_path_factory.mktemp("rows"), [*files, [{"text": "a"}]], documents, **SKIPS)
    expected = local(sources)
    wanted = [seen(each)[:6] for each in batches_of(expected, size, 12, seed=seed)]
    asked = [each.model_copy(update={"remote": actors}) for each in sources]
    with served(asked, seed=seed, cache_bytes=cache_bytes, ends_after=ends_after, checks_losses=False) as (
        dataset,
        clients,
    ):
        found = batches_of(dataset, size, 12)
        assert [seen(each)[:6] for each in found] == wanted
        assert [dataset.name(row) for row in range(dataset.num_rows)] == [*map(expected.name, range(dataset.num_rows))]
        assert [*map(dataset.source_key, dataset.ids)] == [*map(expected.source_key, dataset.ids)]
        again = batches_of(dataset, size, 12 - 5, start=found[4].end)  # as a run that goes on does
        assert [seen(each)[:6] for each in again] == wanted[5:]
        assert all(client.shard.held_bytes <= cache_bytes for client in clients)


@pytest.mark.parametrize("kind", ["jsonl", "gzip", "zstd", "parquet", "arrow file", "arrow stream", "saved"])
def test_files_of_every_kind_are_read_by_row(tmp_path, kind):
    rows = [{"input_ids": [*range(length)], "labels": [-100] + [7] * (length - 1)} for length in (5, 1, 9)]
    path = write(rows * 3, tmp_path / "rows", kind)
    source = DataSource(path=path, max_tokens=9)
    wanted = batches_of(local([source]), GlobalBatch(sequences=4), 5)
    with served([source.model_copy(update={"remote": True})]) as (dataset, _):
        found = batches_of(dataset, GlobalBatch(sequences=4), 5)
        assert [*map(seen, found)] == [*map(seen, wanted)]


def test_chats_are_masked_and_weights_mean_the_same(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    made.chat_template = (
        "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    made.save_pretrained(tmp_path / "tokenizer")
    name = str(tmp_path / "tokenizer")
    chats = [{"messages": messages(*CHAT[:number])} for number in (3, 5)]
    weighed = [{"input_ids": [1, 2, 3], "weights": [0.0, 0.5, 2.0]}, {"text": "a b c"}]
    sources = write_sources(tmp_path, [chats, weighed], max_tokens=99)
    wanted = batches_of(local(sources, lambda: load_tokenizer(name), 11), GlobalBatch(sequences=3), 4)
    asked = [each.model_copy(update={"remote": True}) for each in sources]
    with served(asked, tokenizer_name=name, vocab_size=11) as (dataset, _):
        found = batches_of(dataset, GlobalBatch(sequences=3), 4)
        assert [*map(seen, found)] == [*map(seen, wanted)]
        assert any(-100 in seen(each)[4][:-1] for each in found)


def test_a_weights_key_that_a_border_of_two_parts_cuts_is_seen(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"input_ids": [1, 2], "weights": [0.5, 1]}\n{"input_ids": [1, 2]}\n', encoding="utf-8")
    size, key = path.stat().st_size, path.read_text().index('"weights"')
    for border in range(key, key + 10):
        parts = [Listing(root=path, label="data", part=part) for part in ((0, border), (border, size))]
        rows = [numbered(part, 9) for part in parts]
        assert any(each.counted.weighed for each in rows), border
        for each in rows:
            each.close()


def lines(folder, rows, **settings):
    path = folder / "train.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [DataSource(path=path, **{"max_tokens": 9, "remote": 2, **settings})]


@pytest.mark.parametrize("size", [GlobalBatch(sequences=2), GlobalBatch(tokens=6)])
@pytest.mark.parametrize(("bad", "said"), [("{\n", "broken JSON"), ({"text": "x" * 10}, "10 tokens"), ("\n", "blank")])
def test_a_refused_row_is_named_by_file_and_line_when_its_step_comes(tmp_path, size, bad, said):
    sources = lines(tmp_path, [*[{"text": "abc"}] * 4, bad, *[{"text": "abc"}] * 4])
    with served(sources, part_bytes=20) as (dataset, _):
        steps, found = dataset.batches(size), []
        with pytest.raises(DataError, match=said) as caught:
            found += (found.append(each) for each in steps)
        assert caught.value.where == f"{tmp_path}/train.jsonl:5"
        order = Batches(local(lines(tmp_path, [{"text": "abc"}] * 9, remote=False)), SimpleNamespace(seed=0)).order(0)
        assert [len(each.ids) for each in found if each] == [2] * (order.tolist().index(4) // 2)


def test_a_step_without_a_loss_and_rows_that_are_all_left_out_are_refused(tmp_path):
    with served(lines(tmp_path, [{"text": "a"}] * 3)) as (dataset, _), pytest.raises(DataError, match="with a label"):
        next(dataset.batches(GlobalBatch(sequences=2)))
    sources = lines(tmp_path, [{"text": "a" * 10}] * 3, too_long="skip")
    with served(sources) as (dataset, _), pytest.raises(DataError, match="left out: 3 too long"):
        next(dataset.batches(GlobalBatch(sequences=2)))


def test_rows_are_read_ahead_up_to_the_bound(tmp_path):
    sources = lines(tmp_path, [{"text": f"{row:09}"} for row in range(200)], remote=True)
    with served(sources, cache_bytes=40_000) as (dataset, (client,)):
        batch = batches_of(dataset, GlobalBatch(sequences=4), 1)[0]
        deadline, before = time.monotonic() + 20, -1
        while time.monotonic() < deadline and client.shard.held_bytes != before:
            before = client.shard.held_bytes
            time.sleep(0.05)
        assert 10_000 < client.shard.held_bytes <= 20_000  # the half for rows that nobody took yet
        seen(batch)
        taken = batches_of(dataset, GlobalBatch(sequences=4), 50)
        for each in taken:
            seen(each)
            assert client.shard.held_bytes <= 40_000
        assert len(dataset._steps) <= 4


def test_files_that_change_are_refused(tmp_path):
    sources, lines_said = lines(tmp_path, [{"text": "abc"}] * 4, remote=True), []
    with served(sources, ends_after=3) as (dataset, _):
        dataset.on_restart = lines_said.append
        steps = dataset.batches(GlobalBatch(sequences=1))
        next(steps)
        lines(tmp_path, [{"text": "abd"}] * 4)
        with pytest.raises(DataError, match="stay as"):
            [*islice(steps, 4)]
        assert lines_said == ["data.0, actor 1 of 1 ended and was started again; it reads on from where it was"]


def test_data_that_is_tokens_already_and_broken_files_are_refused(tmp_path):
    (source,) = lines(tmp_path, [{"text": "abc"}], remote=True)
    prepare([source.model_copy(update={"remote": False})], tmp_path / "prepared")
    with pytest.raises(DataError, match="raw rows"):
        remote([DataSource(path=tmp_path / "prepared", max_tokens=9, remote=True)])
    for content, said in (("", "empty file"), ("[1]", "JSON array")):
        (tmp_path / "train.jsonl").write_text(content)
        with pytest.raises(DataError, match=said):
            remote([source])


def test_a_restart_is_said_once_whatever_is_answered_late(tmp_path):
    """Slices that were asked for before it are read after lengths that the new start answered."""
    sources, lines_said = lines(tmp_path, [{"text": "abc"}] * 6, remote=True), []
    with served(sources) as (dataset, (client,)):
        dataset.on_restart = lines_said.append
        steps = dataset.batches(GlobalBatch(sequences=1))
        row = int(next(steps).ids[0])
        dataset.read_ahead([(row, 0, 3)])
        client.shard.close()
        client.shard = Shard(client.spec)
        next(steps)
        dataset.read(row, 0, 3)
        next(steps)
    assert lines_said == ["data.0, actor 1 of 1 ended and was started again; it reads on from where it was"]
