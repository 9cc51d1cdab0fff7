"""Names of the hub where there is no network: it is asked once, and what is not in the cache is refused."""

import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Event, Thread

import pytest

from lengthwise.core import hub_access


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
