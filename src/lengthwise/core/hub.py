"""Whether the Hugging Face hub can be reached, found out once: its library tries again for a minute at each file."""

from __future__ import annotations

import functools
import os
import ssl
import threading
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

HUB_SECONDS = 5.0  # that the hub has to answer; looking up its name takes no time-out of its own
_ENDPOINT = "https://huggingface.co"


def only_cached(name: str) -> bool:
    """Return whether a model or tokenizer of this name is to be looked for in the cache alone; a folder never is."""
    return not Path(name).is_dir() and not hub_answers(endpoint())


def endpoint() -> str:
    """Return the address of the hub: that of its own variable of the environment, or the public one."""
    return os.environ.get("HF_ENDPOINT") or _ENDPOINT


def why_only_cached() -> str:
    """Say why nothing was asked of the hub."""
    if _is_off():
        return "not in the cache, and HF_HUB_OFFLINE is set"
    return f"not in the cache, and {endpoint()} gave no answer within {HUB_SECONDS:.0f} s"


@functools.cache
def hub_answers(address: str) -> bool:
    """Ask a hub for its headers, once in this process and its forks; what it answers does not matter."""
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
        return isinstance(error.reason, ssl.SSLError)  # certificates are for the library of the hub to check
    except (OSError, ValueError):
        return False
