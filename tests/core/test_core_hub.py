"""Names of the hub where there is no network: it is asked once, and what is not in the cache is refused."""

import os
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Event, Thread

import pytest

from lengthwise.core import hub_access

ASKS = """
import socket
asked = []
def refuse(host, *_, **__):
    asked.append(host)
    raise socket.gaierror("no network")
socket.getaddrinfo = refuse

from lengthwise.data import load_tokenizer
from lengthwise.models import find_model
for load in (find_model, load_tokenizer, find_model):
    try:
        load("no/such-model")
    except Exception as error:
        print(error)
print(asked)
"""


@pytest.mark.exhaustive
def test_hub_that_cannot_be_reached_is_asked_once(tmp_path):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "https://hub.invalid"}
    done = subprocess.run([sys.executable, "-c", ASKS], env=environment, capture_output=True, text=True, check=True)
    *refusals, asked = done.stdout.splitlines()
    assert asked == "['hub.invalid']"
    why = "no/such-model: not in the cache, and https://hub.invalid gave no answer within 5 s"
    assert [why in each for each in refusals] == [True] * 3
    assert refusals[0].startswith("error[config] model: expected tiny, a Hugging Face folder")
    assert refusals[1].startswith("error[config] tokenizer: expected a tokenizer at no/such-model")


@pytest.fixture
def unset(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub_access.hub_answers.cache_clear()
    yield
    hub_access.hub_answers.cache_clear()


@pytest.mark.parametrize("status", [200, 503])
def test_hub_that_answers_anything_is_reached(unset, status):
    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.handle_request, daemon=True).start()
        assert hub_access.hub_answers(f"http://127.0.0.1:{server.server_port}")


def test_hub_that_is_silent_or_hangs_is_not_reached(unset, monkeypatch):
    monkeypatch.setattr(hub_access, "HUB_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert not hub_access.hub_answers(address)
    assert not hub_access.hub_answers(f"{address}/closed")
    monkeypatch.setattr(hub_access, "urlopen", lambda *_, **__: Event().wait())
    assert not hub_access.hub_answers("http://hangs.invalid")
    assert not hub_access.hub_answers("not an address")


def test_hub_is_not_asked_for_folders_nor_where_it_is_switched_off(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_access, "_answers", lambda _address: pytest.fail("asked"))
    assert not hub_access.only_cached(str(tmp_path))
    assert hub_access.only_cached("no/such-model")
    assert hub_access.why_only_cached() == "not in the cache, and HF_HUB_OFFLINE is set"
