"""Data at a URL: copied once, checked, known when it changes, refused when it cannot be had."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from lengthwise.config import DataSource, build_config
from lengthwise.core.errors import LengthwiseError
from lengthwise.core.locks import try_lock
from lengthwise.data import fetch, load_dataset
from lengthwise.data.fetch import fetch_sources
from lengthwise.data.prepare import prepare_store
from lengthwise.data.tokenizer import ByteTokenizer
from training.small_runs import call

ROWS = b"".join(json.dumps({"text": "x" * n}).encode() + b"\n" for n in range(1, 60))


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LENGTHWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "_FIRST_WAIT_SECONDS", 0.01)


class Server:
    """Files by name over HTTP, without ranges; `fault` says what GET answers wrongly, so many times."""

    def __init__(self):
        self.files, self.gets, self.tag, self.fault, self.faults = {}, [], "1", "", 0
        self.kind = "application/octet-stream"
        self.down, self.failing = 0, ""  # so many answers, HEAD or GET, of names that end so, are 500
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format, *_):
                pass

            def do_HEAD(self):
                self.answer(body=False)

            def do_GET(self):
                outer.gets.append(self.path)
                self.answer(body=True)

            def answer(self, *, body):
                content = outer.files.get(self.path[1:])
                fault = ""
                if body and content is not None and outer.faults:
                    outer.faults -= 1
                    fault = outer.fault
                if outer.down and self.path.endswith(outer.failing):
                    outer.down -= 1
                    fault = "500"
                self.send_response(404 if content is None else 500 if fault == "500" else 200)
                content = content or b""
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Content-Type", outer.kind)
                if outer.tag:
                    self.send_header("ETag", outer.tag)
                self.end_headers()
                if body:
                    sent = {"cut": content[: len(content) // 2], "garbage": b"?" * len(content)}.get(fault, content)
                    with contextlib.suppress(OSError):
                        self.wfile.write(sent)
                    self.close_connection = True

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server():
    pytest.importorskip("aiohttp")
    made = Server()
    made.files["rows.jsonl"] = ROWS
    yield made
    with contextlib.suppress(OSError):
        made.stop()


def fetched(url, told=None):
    path = fetch_sources([DataSource(url=url)], "data", (told if told is not None else []).append)[0].path
    assert path is not None, "a copy"
    return path


def test_a_file_over_http_is_copied_once_and_read_without_its_server(server):
    url = f"{server.url}/rows.jsonl"
    path = fetched(url)
    assert path.read_bytes() == ROWS
    assert path.name == "rows.jsonl"
    gets = len(server.gets)
    assert fetched(url) == path
    assert len(server.gets) == gets, "the second time nothing is copied"
    server.stop()
    told = []
    assert fetched(url, told) == path
    assert "is not reached" in told[-1]


def test_a_file_that_changed_is_copied_again(server):
    first = fetched(f"{server.url}/rows.jsonl")
    server.files["rows.jsonl"], server.tag = ROWS[::-1], "2"
    second = fetched(f"{server.url}/rows.jsonl")
    assert first != second
    assert second.read_bytes() == ROWS[::-1]


@pytest.mark.parametrize("fault", ["500", "cut"])
def test_a_copy_that_fails_is_made_again_so_many_times(server, fault):
    server.fault, server.faults = fault, 2
    told = []
    assert fetched(f"{server.url}/rows.jsonl", told).read_bytes() == ROWS
    assert any(line.startswith("waiting ") and "try 2 of 4" in line for line in told), told
    server.faults, server.tag = 1000, "2"
    with pytest.raises(LengthwiseError, match=r"data\.0\.url: expected .*rows\.jsonl") as caught:
        fetched(f"{server.url}/rows.jsonl")
    assert server.url in str(caught.value)


def test_a_file_that_could_change_unseen_is_refused(server):
    server.tag = ""
    with pytest.raises(LengthwiseError, match="tells no ETag, version or time"):
        fetched(f"{server.url}/rows.jsonl")


def test_what_is_not_there_is_said_at_once(server):
    with pytest.raises(LengthwiseError, match=r"data\.0\.url: .*got nothing at http"):
        fetched(f"{server.url}/other.jsonl")


def test_prepared_data_is_copied_and_every_byte_checked(server, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    source = DataSource(path=tmp_path / "rows.jsonl")
    prepare_store([source], tmp_path / "store", tokenizer_name="bytes", tokenizer=ByteTokenizer)
    server.files |= {f"store/{each.name}": each.read_bytes() for each in (tmp_path / "store").iterdir()}
    path = fetched(f"{server.url}/store")
    opened = load_dataset([DataSource(path=path)], tokenizer=ByteTokenizer, vocab_size=None)
    assert opened.lengths.tolist() == load_dataset([source], tokenizer=ByteTokenizer, vocab_size=None).lengths.tolist()
    damaged = server.files["store/tokens-00000.bin"]
    server.files["other/lengthwise-store.json"] = server.files["store/lengthwise-store.json"]
    server.files |= {f"other/{name[6:]}": raw for name, raw in server.files.items() if name.startswith("store/")}
    server.files["other/tokens-00000.bin"] = b"?" * len(damaged)
    with pytest.raises(LengthwiseError, match=r"other/tokens-00000\.bin with \d+ bytes of SHA-256"):
        fetched(f"{server.url}/other")


@pytest.mark.parametrize("name", ["lengthwise-store.json", "tokens-00000.bin"])
def test_prepared_data_is_known_as_such_by_a_server_that_is_down_for_a_while(server, tmp_path, name):
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    source = DataSource(path=tmp_path / "rows.jsonl")
    prepare_store([source], tmp_path / "store", tokenizer_name="bytes", tokenizer=ByteTokenizer)
    server.files |= {f"store/{each.name}": each.read_bytes() for each in (tmp_path / "store").iterdir()}
    server.files["store"] = b"<html>what servers show of a folder</html>"
    server.down, server.failing = 2, name
    told = []
    assert fetched(f"{server.url}/store", told).is_dir()
    assert any(line.startswith("waiting ") and name in line for line in told), told
    server.down, server.failing = 1000, name
    server.files["other"] = server.files["store"]
    server.files |= {f"other/{key[6:]}": raw for key, raw in server.files.items() if key.startswith("store/")}
    with pytest.raises(LengthwiseError, match=rf"in 4 tries; got .*other/{name}.*500"):
        fetched(f"{server.url}/other")


def test_a_copy_that_was_cut_off_is_not_taken(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    path = fetched(f"file://{tmp_path}/rows.jsonl")
    path.rename(path.with_name("rows.jsonl.unfinished"))
    path.with_name("rows.jsonl.unfinished").write_bytes(b"half")
    assert fetched(f"file://{tmp_path}/rows.jsonl").read_bytes() == ROWS


def test_a_folder_is_copied_whole_and_again_when_a_file_in_it_changes(tmp_path):
    there = tmp_path / "there"
    for name in ("a.jsonl", "deep/b.jsonl", ".hidden", "deep/.git/config"):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(ROWS)
    url, told = f"file://{there}", []
    first = fetched(url, told)
    assert first.name == "there"
    assert sorted(str(each.relative_to(first)) for each in first.rglob("*") if each.is_file()) == [
        "a.jsonl",
        "deep/b.jsonl",
    ]
    assert fetched(url, told) == first
    assert len(told) == 1, "the second time nothing is copied"
    (there / "deep/b.jsonl").write_bytes(ROWS[:-1])
    second = fetched(url)
    assert second != first
    assert (second / "deep/b.jsonl").read_bytes() == ROWS[:-1]


def test_documents_in_a_folder_at_a_url_are_the_documents_of_the_folder(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(5):
        (tmp_path / "texts" / f"{number}.txt").write_text("word " * (number + 1))
    here = fetch_sources([DataSource(url=f"file://{tmp_path}/texts")], "data", print)
    found = [
        load_dataset(each, tokenizer=ByteTokenizer, vocab_size=None)
        for each in (here, [DataSource(path=tmp_path / "texts")])
    ]
    assert found[0].digest() == found[1].digest()
    assert found[0].lengths.size == 5


@pytest.mark.parametrize("end", ["bin", "idx"])
def test_a_pair_of_megatrons_files_comes_together(tmp_path, end):
    (tmp_path / "data.bin").write_bytes(b"tokens")
    (tmp_path / "data.idx").write_bytes(b"index")
    path = fetched(f"file://{tmp_path}/data.{end}")
    assert {each.name: each.read_bytes() for each in path.parent.iterdir()} == {
        "data.bin": b"tokens",
        "data.idx": b"index",
    }
    (tmp_path / "data.idx").unlink()
    with pytest.raises(LengthwiseError, match=r"nothing at .*data\.idx"):
        fetched(f"file://{tmp_path}/data.{end}")


def test_a_pattern_and_a_page_of_a_server_are_no_data(tmp_path, server):
    (tmp_path / "a.jsonl").write_bytes(ROWS)
    with pytest.raises(LengthwiseError, match=r"a folder without `\*`"):
        fetched(f"file://{tmp_path}/*.jsonl")
    server.files["data"], server.kind = b"<html>a.jsonl</html>", "text/html"
    with pytest.raises(LengthwiseError, match="a page of HTML"):
        fetched(f"{server.url}/data")


def test_what_the_disk_has_no_room_for_is_refused_before_a_byte_is_copied(server, monkeypatch):
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: SimpleNamespace(free=len(ROWS) - 1))
    with pytest.raises(LengthwiseError, match="room for a copy"):
        fetched(f"{server.url}/rows.jsonl")
    assert server.gets == []


def test_a_wait_for_another_process_that_copies_ends_and_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "_TELL_SECONDS", 0.0)
    monkeypatch.setattr(fetch, "_QUIET_SECONDS", 0.5)
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    url, told = f"file://{tmp_path}/rows.jsonl", []
    lock = fetched(url).parents[1] / "lock"
    with try_lock(lock), pytest.raises(LengthwiseError, match=r"none from process \d+ on"):
        fetched(url, told)
    assert any("which copies" in line for line in told)


def test_without_a_cache_a_url_is_refused(monkeypatch):
    monkeypatch.setenv("LENGTHWISE_CACHE", "off")
    with pytest.raises(LengthwiseError, match=r"data\.0\.url: .*got LENGTHWISE_CACHE=off"):
        fetched("file:///nothing.jsonl")


@pytest.mark.parametrize(
    "url", ["file://me:hidden@host/a.jsonl", "file:///a.jsonl?token=hidden", "rows.jsonl", "no://x"]
)
def test_a_url_with_a_secret_or_of_no_store_is_refused_without_telling_it(tmp_path, url):
    run = {"model": "tiny", "data": [{"url": url}], "global_batch": {"sequences": 1}, "steps": 1, "output": "out"}
    with pytest.raises(LengthwiseError, match=r"data\.0\.url: expected a URL that fsspec reads") as caught:
        build_config(run, folder=tmp_path)
    assert "hidden" not in str(caught.value)


def test_commands_take_a_url_in_place_of_a_file(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    url, out = f"file://{tmp_path}/rows.jsonl", tmp_path / "store"
    assert call("prepare", url, "--tokenizer", "bytes", "--out", out) == 0
    assert load_dataset([DataSource(path=out)], tokenizer=ByteTokenizer, vocab_size=None).lengths.size == 59
    assert call("data", url) == 0
    assert "59 sequences" in capsys.readouterr().out
    sizes = ("--gpus", "1", "--batch-tokens", "2K", "--out", tmp_path / "sim")
    assert call("simulate", "--model", "tiny", "--data", url, *sizes) == 0
    assert "written to" in capsys.readouterr().out
    assert call("data", "file://me:hidden@host/a.jsonl") == 2
    said = capsys.readouterr().err
    assert "a URL that fsspec reads" in said
    assert "hidden" not in said


def test_a_large_file_needs_no_ranges_of_its_server(server):
    server.files["large.jsonl"] = ROWS * (24 * 2**20 // len(ROWS))
    assert fetched(f"{server.url}/large.jsonl").read_bytes() == server.files["large.jsonl"]
    assert server.gets == ["/large.jsonl"]
