"""A command under an audit hook: whatever runs or loads code, or reaches for the network, is written down."""

import json
import os
import sys

import torch

MARK = "lw_hostile_mark"  # part of every payload: in the name of its module, and in its text
LOOPBACK = ("127.", "::1", "localhost", "/")


def watch(report):
    """Write a line into the descriptor `report` for each event that must not be; there is no way to stop watching."""

    def note(*what):
        os.write(report, (json.dumps([str(each)[:200] for each in what]) + "\n").encode())

    def hook(event, arguments):
        if event == "pickle.find_class":
            if not str(arguments[0]).startswith("lengthwise."):
                note(event, *arguments)
        elif event in ("compile", "exec", "import", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"):
            if MARK in _text(arguments):
                note(event, _text(arguments))
        elif event == "ctypes.dlopen":
            if MARK in str(arguments[0]):
                note(event, *arguments)
        elif event in ("socket.getaddrinfo", "socket.connect"):
            host = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
            host = str(host[0]) if isinstance(host, tuple) else str(host or "")
            if host and not host.startswith(LOOPBACK):
                note(event, host)

    for module, name in ((torch, "load"), (torch.jit, "load"), (torch.hub, "load")):
        setattr(module, name, _noting(note, f"{module.__name__}.{name}", getattr(module, name)))
    sys.addaudithook(hook)


def _text(arguments):
    """What is compiled, executed or imported, as text: sources, and the names and constants of code objects."""
    found = []
    for each in arguments:
        code = getattr(each, "co_consts", None)
        found.append(str(each) if code is None else f"{each.co_filename} {each.co_names} {code}")
    return " ".join(found)


def _noting(note, name, function):
    def called(*arguments, **options):
        note(name)
        return function(*arguments, **options)

    return called
