"""Runs programs on a plain loop and on sessions over ranks, and judges what came out."""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lengthwise.comm import World
from lengthwise.core.errors import LengthwiseError, TransferError
from lengthwise.models import keep_double
from lengthwise.planner.service import process
from testing.loop_programs.loops import Numbers, PlainLoop, PlannedLoop, run_operations
from testing.loop_programs.program import Program, first_refused, is_sound, refusable_at, refuses_start
from testing.ranks import fork_ranks

BAR = 1e-9  # relative
_SECONDS = 60.0  # a program may take
WAIT_SECONDS = 10.0  # a rank waits for another, on a busy machine, too


@dataclass(slots=True, kw_only=True)
class Ran:
    """What a program gave on a rank.

    numbers: of each operation that ended. refused: what our error said; other: what another error was.
    weights: that trained, by name, where it ran to its end.
    """

    numbers: list[Numbers] = field(default_factory=list)
    refused: str | None = None
    other: str | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def ending(self) -> tuple[int, bool, bool]:
        """How it ended, which must be the same on all ranks."""
        return len(self.numbers), self.refused is not None, self.other is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """same: as the plain loop. refused: where that is allowed. failed: anything else; `why` says what.

    harm: what kind of failure it is. place: the operation that it shows at.
    """

    kind: Literal["same", "refused", "failed"]
    why: str = ""
    harm: Literal["", "numbers", "weights", "another error", "ranks differ", "not refused", "refused"] = ""
    place: int | None = None


def run_plain(program: Program) -> Ran:
    """Run a program on the plain loop, to what a session must refuse."""
    ran = Ran()
    with keep_double(torch.float64):
        loop = PlainLoop(program)
    run_operations(loop, program.operations[: first_refused(program)], ran.numbers)
    ran.weights = loop.weights()
    return ran


def run_rank(program: Program, wait_seconds: float) -> Ran:
    """Run a program on a session, in a process that has joined the other ranks or is alone."""
    ran, loop = Ran(), None
    try:
        with keep_double(torch.float64), redirect_stdout(StringIO()):
            loop = PlannedLoop(program, wait_seconds)
        run_operations(loop, program.operations, ran.numbers)
        ran.weights = loop.weights()
    except TransferError as error:
        ran.other = str(error)
    except LengthwiseError as error:
        ran.refused = str(error)
    except Exception:  # noqa: BLE001 - what an operation must not end in
        ran.other = traceback.format_exc(limit=-3)
    finally:
        if loop is not None:
            with suppress(Exception):
                loop.close()
    return ran


def run_ranks_of(programs: Sequence[Program], wait_seconds: float) -> list[list[Ran]]:
    """Run programs of as many ranks, one after the other in the same processes; return what each rank gave.

    A program after which ranks differ, hang or die takes its processes with it; the next one gets new ones.
    """
    found = list[list[Ran]]()
    while len(found) < len(programs):
        left = programs[len(found) :]
        with tempfile.TemporaryDirectory(prefix="lengthwise-programs-") as folder:
            died = ""
            try:
                fork_ranks(partial(_run_all, left, Path(folder), wait_seconds), left[0].ranks, timeout_seconds=1e6)
            except LengthwiseError as error:
                died = str(error)
            before = len(found)
            for number, program in enumerate(left):
                files = [_file(Path(folder), number, rank) for rank in range(program.ranks)]
                if all(file.exists() for file in files):
                    found.append([_read(file) for file in files])
                elif died:
                    found.append([_read(file) if file.exists() else Ran(other=died) for file in files])
                    break
                else:
                    break
            assert len(found) > before, "ranks end after a program at least"
    return found


def _run_all(programs: Sequence[Program], folder: Path, wait_seconds: float, world: World) -> None:
    rank, ranks = world.rank, world.world_size
    if ranks > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        meeting, timeout = f"file://{folder / 'meeting'}", timedelta(seconds=wait_seconds)
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timeout)
    torch.set_num_threads(1)
    for number, program in enumerate(programs):
        if ranks > 1:
            faulthandler.dump_traceback_later(_SECONDS, exit=True)
        ran = run_rank(program, wait_seconds)
        file = _file(folder, number, rank)
        file.with_suffix(".part").write_bytes(pickle.dumps(ran))
        file.with_suffix(".part").rename(file)
        if not _agree([_file(folder, number, each) for each in range(ranks)], wait_seconds):
            break
    faulthandler.cancel_dump_traceback_later()
    # No rank leaves the group by a call: others may not be there. The process ends with it.


def _agree(files: Sequence[Path], wait_seconds: float) -> bool:
    """Return whether all ranks ended a program alike, and the next one may follow."""
    end = time.monotonic() + 2 * wait_seconds
    while not all(file.exists() for file in files):
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    first, *others = (_read(file) for file in files)
    return first.other is None and all(each.ending == first.ending for each in others)


def _file(folder: Path, number: int, rank: int) -> Path:
    return folder / f"{number}-{rank}.ran"


def _read(file: Path) -> Ran:
    return pickle.loads(file.read_bytes())  # written a moment ago by our own children


@contextmanager
def forked_planners() -> Iterator[None]:
    """Fork the planner process of a session: a new one takes 0.3 s."""
    with mock.patch.object(process, "_start", process._fork):
        yield


def judge(program: Program, plain: Ran, ranks: Sequence[Ran]) -> Verdict:
    """Judge what the ranks gave by what the plain loop gave."""
    must = first_refused(program)
    harm: Any
    for harm, found in (
        ("another error", _other_error(ranks)),
        ("ranks differ", _unequal_endings(ranks)),
        ("numbers", _other_numbers(plain, ranks, must)),
    ):
        if found is not None:
            place, why = found
            return _failed(program, harm, place, why)
    place, refused = len(ranks[0].numbers), ranks[0].refused
    if refused is None and must < len(program.operations):
        return _failed(program, "not refused", must, "not refused")
    if refused is None:
        why = _other_weights(plain.weights, ranks[0].weights)
        return _failed(program, "weights", place, why) if why else Verdict(kind="same")
    if not refusable_at(program, place):
        return _failed(program, "refused", place, f"refused where the plain loop's result is promised: {refused}")
    alone = [each for each in program.operations[: place + 1] if each.name == "alone"]
    if alone and not refuses_start(program) and f"rank {alone[0].arguments['rank'] % program.ranks}" not in refused:
        return _failed(program, "refused", place, f"the rank that is alone in {alone[0]} is not named: {refused}")
    return Verdict(kind="refused", why=refused, place=place)


def _failed(program: Program, harm: Any, place: int, why: str) -> Verdict:
    name = f"operation {place}, {program.operations[place].name}" if place < len(program.operations) else "the end"
    return Verdict(kind="failed", harm=harm, place=place, why=f"{name}: {why}")


def _other_error(ranks: Sequence[Ran]) -> tuple[int, str] | None:
    for rank, ran in enumerate(ranks):
        if ran.other is not None:
            beside = "".join(f"\nrank {r} refused: {each.refused}" for r, each in enumerate(ranks) if each.refused)
            return len(ran.numbers), f"rank {rank}: {ran.other}{beside}"
    return None


def _unequal_endings(ranks: Sequence[Ran]) -> tuple[int, str] | None:
    if len({ran.ending for ran in ranks}) == 1:
        return None
    ended = "; ".join(f"rank {rank} {ran.refused or 'went on'}" for rank, ran in enumerate(ranks))
    return min(len(ran.numbers) for ran in ranks), f"ranks differ in what is refused: {ended}"


def _other_numbers(plain: Ran, ranks: Sequence[Ran], until: int) -> tuple[int, str] | None:
    for rank, ran in enumerate(ranks):
        for number, (expected, got) in enumerate(zip(plain.numbers[:until], ran.numbers[:until], strict=False)):
            if len(expected) != len(got) or not all(map(_is_close, expected, got)):
                return number, f"rank {rank} has {got}, the plain loop {expected}"
    return None


def _other_weights(plain: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    if plain.keys() != own.keys():
        return f"weights of {sorted(own)}, the plain loop's of {sorted(plain)}"
    apart = {name: float((own[name] - each).norm() / each.norm().clamp(min=1e-3)) for name, each in plain.items()}
    worst, beyond = max(apart, key=lambda name: apart[name]), sum(not each <= BAR for each in apart.values())
    return f"{beyond} weights are others; {worst} by {apart[worst]:.1e}" if beyond else ""


def _is_close(expected: float, got: float) -> bool:
    return math.isclose(expected, got, rel_tol=BAR, abs_tol=1e-12)


def verdicts(programs: Sequence[Program], *, wait_seconds: float = WAIT_SECONDS) -> list[Verdict]:
    """Run programs and judge them, in their order."""
    found = dict[int, Verdict]()
    with forked_planners(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for ranks in sorted({program.ranks for program in programs}):
            numbers = [number for number, program in enumerate(programs) if program.ranks == ranks]
            plain = [run_plain(programs[number]) for number in numbers]
            ran = run_ranks_of([programs[number] for number in numbers], wait_seconds)
            gc.collect()  # sessions of this process, whose planners no fork of it can end
            for number, expected, got in zip(numbers, plain, ran, strict=True):
                found[number] = judge(programs[number], expected, got)
    return [found[number] for number in range(len(programs))]


def shortest(program: Program, *, seconds: float = 60.0, wait_seconds: float = WAIT_SECONDS) -> Program:
    """Drop operations from a program that fails, one by one, while it still does by the same harm."""
    end, (found,) = time.monotonic() + seconds, verdicts([program], wait_seconds=wait_seconds)
    while time.monotonic() < end:
        every = program.operations
        fewer = [replace(program, operations=(*every[:place], *every[place + 1 :])) for place in range(len(every))]
        fewer += [replace(program, early_hook=None)] if program.early_hook else []
        fewer = [each for each in fewer if each.operations and is_sound(each)]
        judged = zip(fewer, verdicts(fewer, wait_seconds=wait_seconds), strict=True)
        less = next((each for each, verdict in judged if verdict.harm == found.harm), None)
        if less is None:
            break
        program = less
    return program
