"""Whether the Hugging Face hub answers, asked once; its own library retries for a minute at each file."""

from __future__ import annotations

import functools
import os
import ssl
import threading
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

HUB_SECONDS = 5.0  # limit of the answer; a thread, because the lookup of the host name has no time-out
_ENDPOINT = "https://huggingface.co"


def only_cached(name: str) -> bool:
    """Return whether a model or tokenizer must come from the cache alone; always False for a folder."""
    return not Path(name).is_dir() and not hub_answers(endpoint())


def endpoint() -> str:
    """Return the address of the hub: HF_ENDPOINT if set, else the public one."""
    return os.environ.get("HF_ENDPOINT") or _ENDPOINT


def why_only_cached() -> str:
    """Return the reason why the hub was not asked, for an error about a file that the cache lacks."""
    if _is_off():
        return "not in the cache, and HF_HUB_OFFLINE is set"
    return f"not in the cache, and {endpoint()} gave no answer within {HUB_SECONDS:.0f} s"


@functools.cache
def hub_answers(address: str) -> bool:
    """Return whether a hub answers a HEAD request at all; asked once per process and its forks."""
    if _is_off():
        return False
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(_answers(address)), name="hub", daemon=True)
    asking.start()
    asking.join(HUB_SECONDS)
    return answers == [True]


def _is_off() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _answers(address: str) -> bool:
    try:
        with urlopen(Request(address, method="HEAD"), timeout=HUB_SECONDS):  # noqa: S310 - the user's own address
            return True
    except HTTPError:
        return True
    except URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the hub's own library checks certificates
    except (OSError, ValueError):
        return False
