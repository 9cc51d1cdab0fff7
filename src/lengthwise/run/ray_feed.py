"""Feeds of `remote` data as Ray actors: rank 0 makes them, and every rank asks them.

If RAY_ADDRESS names a running Ray, actors start there; else rank 0 starts a local Ray, which ends with the run. Actors
belong to rank 0. Ray restarts a killed actor and repeats its requests. Ray trusts its network: docs/data.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lengthwise.comm import Transport, broadcast_bytes, share_numbers
from lengthwise.core.errors import LengthwiseError, RankError
from lengthwise.core.names import counted
from lengthwise.data.feed import Feed, FeedSpec
from lengthwise.data.feed_dataset import FeedDataset
from lengthwise.run.node_feed import FeedRank

_STORE_BYTES = 512 << 20  # object store of a local Ray, for slices in transit
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": a local Ray listens on loopback alone, on Linux too
_OF_ALL_RANKS = ("RAY_AUTH_MODE", _CLUSTERS)  # a local Ray asks for the token in the user's home
_RAY = "a Ray that answers, for `remote` data"


@contextlib.contextmanager
def ray_feed(rank: FeedRank) -> Iterator[None]:
    """Feed the dataset from actors inside the block. Collective."""
    dataset, world, transport = rank.dataset, rank.world, rank.transport
    transport.phase = "start, actors of remote data"
    if world.rendezvous is not None and "ray._raylet" in sys.modules:
        expected, got = "ranks of a process without Ray, which does not survive a fork", "one that has imported it"
        remedy = "Call `train` from a process that has not, use the command line, or torchrun."
        raise RankError(f"rank {transport.rank}, {transport.phase}", expected=expected, got=got, remedy=remedy)
    owns_ray, actors = not _is_connected(), list[Any]()
    try:
        error, message = None, {}
        if not transport.rank:
            try:
                message = _begin(dataset, actors, transport.world_size, local=owns_ray)
            except Exception as raised:  # noqa: BLE001 - whatever it is, all ranks end with it
                error = _no_ray(transport, raised)
        found = json.loads(broadcast_bytes(transport, json.dumps(message).encode() if not transport.rank else None))
        if error is not None or not found:
            raise error or _no_ray(transport, "none on rank 0")
        clients = _clients(dataset, found, transport, rank.timeout_seconds)
        rank.attach(clients, transport.rank, "files of remote data")
        rank.say(f"remote: {counted(len(clients), 'actor')}, Ray at {found['address']}")
        yield
        transport.phase = "end, actors of remote data"
        if transport.rank and owns_ray:
            _disconnect()
        share_numbers(transport, [0.0])  # rank 0, which may own the Ray, is the last to leave
    finally:
        if owns_ray:
            _disconnect()


def _is_connected() -> bool:
    """Whether this process uses Ray already."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _disconnect() -> None:
    if _is_connected():
        import ray

        ray.shutdown()


def _begin(dataset: FeedDataset, actors: list[Any], ranks: int, *, local: bool) -> dict[str, Any]:
    """Connect to Ray, or start it, and make the actors; return the values by which ranks find them.

    actors: list that receives the handles; an actor ends with its handle.
    """
    name = f"lengthwise-{secrets.token_hex(8)}"
    if local:
        address = os.environ.get("RAY_ADDRESS")
        if not address:
            os.environ.setdefault(_CLUSTERS, "0")
        started = {"num_cpus": len(dataset.specs), "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        _connect(address or "local", name, **({} if address else started))
    import ray  # reads the environment

    for number, spec in enumerate(dataset.specs):
        options = {"name": f"{name}-{number}", "namespace": name, "max_restarts": -1, "max_task_retries": -1}
        options["max_concurrency"] = 2 * ranks  # a rank that waits for rows must not block another's slices
        actors.append(ray.remote(num_cpus=1)(Feed).options(**options).remote(replace(spec, clients=ranks)))
    environment = {each: os.environ[each] for each in _OF_ALL_RANKS if each in os.environ}
    return {"address": ray.get_runtime_context().gcs_address, "name": name, "environment": environment}


def _connect(address: str, namespace: str, **options: Any) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    with _sigterm_kept():
        ray.init(address=address, namespace=namespace, **quiet, **options)


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep this process's handler of SIGTERM inside the block: Ray's ends the process at once, ours ends the step."""
    before, change = signal.getsignal(signal.SIGTERM), signal.signal

    def changed(number: int, handler: Any) -> Any:
        return before if number == signal.SIGTERM else change(number, handler)

    signal.signal = changed
    try:
        yield
    finally:
        signal.signal = change
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray has set another handler, below Python


def _clients(dataset: FeedDataset, found: dict[str, Any], transport: Transport, seconds: float) -> list[_ActorClient]:
    if not _is_connected():
        os.environ.update(found["environment"])
    try:
        import ray

        if not ray.is_initialized():
            _connect(found["address"], found["name"])
        actors = [ray.get_actor(f"{found['name']}-{number}", found["name"]) for number in range(len(dataset.specs))]
    except Exception as error:  # noqa: BLE001 - Ray raises many
        raise _no_ray(transport, error) from None
    return [_ActorClient(*each, transport, seconds) for each in zip(dataset.specs, actors, strict=True)]


def _no_ray(transport: Transport, error: object) -> RankError:
    where = f"rank {transport.rank}, {transport.phase}"
    got = " ".join(str(error).split())[:300] or type(error).__name__
    remedy = "Start Ray on every node (ray start), and set RAY_ADDRESS; or take remote out of `data`."
    return RankError(where, expected=_RAY, got=got, remedy=remedy)


@dataclass(frozen=True)
class _ActorClient:
    """`FeedClient` of an actor."""

    spec: FeedSpec
    actor: Any
    transport: Transport
    timeout_seconds: float

    def __call__(self, method: str, *arguments: Any) -> Callable[[], Any]:
        reference = getattr(self.actor, method).remote(*arguments)
        return lambda: self._answer(reference)

    def _answer(self, reference: Any) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        where = f"rank {self.transport.rank}, {self.transport.phase}, waiting for {self.spec.name}"
        try:
            return ray.get(reference, timeout=self.timeout_seconds)
        except GetTimeoutError:
            expected, got = f"rows within {self.timeout_seconds:g} s", "none"
            remedy = (
                "Check that Ray's nodes and the disk answer, set `remote` to more actors, or raise {timeout_seconds}."
            )
        except RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, LengthwiseError):
                raise cause from None
            expected, got = "rows", " ".join(f"{type(error).__name__}: {error}".split())[:300]
            remedy = "See the logs of Ray; then start again."
        raise RankError(where, expected=expected, got=got, remedy=remedy) from None
