"""Nodes of a cluster on one machine: a network namespace a node, veth pairs on a bridge, `tc tbf` on both ways.

What the ranks of one node send each other stays on the loopback of its namespace; what leaves it goes over one veth,
whose queue lets so many bytes a second out, and so many in. Segmentation offload is off: a bucket counts the frames of
an Ethernet of 9,000 bytes, not the 64 KB that the kernel would hand over at once. Needs root and iproute2's `ip` and
`tc`. Everything is named after this process and removed when the block is left, by an error or Ctrl-C too; what a
killed process left behind is removed by the next one.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lengthwise.core.errors import ConfigError

FRAME_BYTES, HEADER_BYTES = 9000, 66  # Ethernet's 14, IP's 20 and TCP's 32 travel too; a frame's MTU leaves out the 14
BURST_SECONDS, QUEUE_BYTES = 0.004, 64_000_000  # a bucket loses what comes while its timer is late, as under load
# Short messages on a link that is known: no probing for its rate, and no queue that answers would wait behind.
_TCP = "net.ipv4.tcp_slow_start_after_idle=0 net.ipv4.tcp_congestion_control=reno 'net.ipv4.tcp_wmem=4096 65536 131072'"
_PREFIX, _NEW_NETWORK = "lwemu", 0x40000000  # CLONE_NEWNET


class ShapedNodes:
    """Namespaces of running nodes; a forked process enters one before it opens a socket."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def enter(self, node: int) -> None:
        """Move this process into the namespace of a node, and gloo to its interface."""
        with Path(f"/run/netns/{self._names[node]}").open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter {self._names[node]}")
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


@contextmanager
def shaped_nodes(nodes: int, bytes_per_second: float, option: str = "--namespaces") -> Iterator[ShapedNodes]:
    """Make so many nodes, each with a link of `bytes_per_second` of payload in either direction; `option` asked for it.

    Raises:
        ConfigError: not root, or `ip` or `tc` are missing.
    """
    _refuse_what_is_missing(option)
    _remove(_left_behind())
    own = f"{_PREFIX}{os.getpid()}"
    names = [f"{own}n{node}" for node in range(nodes)]
    rate = round(8 * bytes_per_second * (FRAME_BYTES + 14) / (FRAME_BYTES + 14 - HEADER_BYTES))
    burst = max(2 * FRAME_BYTES, round(BURST_SECONDS * rate / 8))
    shape = f"root tbf rate {rate}bit burst {burst} limit {QUEUE_BYTES}"
    try:
        _run(f"ip link add {own} mtu {FRAME_BYTES} type bridge", f"ip link set {own} up")
        for node, name in enumerate(names):
            outside = f"{own}p{node}"
            _run(
                f"ip netns add {name}",
                f"ip link add {outside} mtu {FRAME_BYTES} type veth peer name eth0 mtu {FRAME_BYTES} netns {name}",
                f"ip link set {outside} gso_max_segs 1 master {own} up",
                f"ip -n {name} addr add 10.213.{node // 250}.{node % 250 + 1}/16 dev eth0",
                f"ip -n {name} link set eth0 gso_max_segs 1 up",
                f"ip -n {name} link set lo up",
                f"ip netns exec {name} sysctl -q -w {_TCP}",
                f"tc -n {name} qdisc add dev eth0 {shape}",
                f"tc qdisc add dev {outside} {shape}",
            )
        yield ShapedNodes(names)
    finally:
        _remove([own])


def _left_behind() -> list[str]:
    """Name what processes that are no more have left."""
    listed = _output("ip netns list") + _output("ip -br link show type bridge")
    owners = {match[0] for match in re.finditer(rf"\b{_PREFIX}(\d+)", listed)}
    return [owner for owner in sorted(owners) if not Path(f"/proc/{owner.removeprefix(_PREFIX)}").exists()]


def _remove(owners: list[str]) -> None:
    """Remove the links, namespaces and bridges of `owners`.

    Links would end with their namespace, but a while after `ip` has returned, and their names could not be used again.
    """
    for owner in owners:
        for name in re.findall(rf"^({owner}p\d+)\b", _output("ip -br link show type veth"), re.MULTILINE):
            _run(f"ip link del {name}")
        for name in re.findall(rf"^({owner}n\d+)\b", _output("ip netns list"), re.MULTILINE):
            _run(f"ip netns del {name}")
        if re.search(rf"^{owner}\b", _output("ip -br link show type bridge"), re.MULTILINE):
            _run(f"ip link del {owner}")


def _refuse_what_is_missing(option: str) -> None:
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        got = f"no {' and '.join(missing)}" if missing else f"user {os.geteuid()}"
        remedy = f"Run as root on Linux with iproute2, or without {option}."
        raise ConfigError(option, expected="root, and the commands ip and tc", got=got, remedy=remedy)


def _run(*commands: str) -> None:
    for command in commands:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True)
        if done.returncode:
            remedy = "See whether the kernel has namespaces, veth and sch_tbf."
            raise ConfigError("--namespaces", expected=command, got=done.stderr.strip(), remedy=remedy)


def _output(command: str) -> str:
    return subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout
