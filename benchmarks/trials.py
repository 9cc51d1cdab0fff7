"""Small runs that are killed, stopped, damaged and fed with changed bytes at random: what `durability` counts.

A run of eight steps on 1 to 3 ranks, with a checkpoint every other step in the background. Any end that reliability.md
does not promise is a `Failure`: other bits than those of an undisturbed run, a damage that was trained on, a traceback,
a process that is left, a run that hangs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from testing.faults import VARIABLE

from lengthwise.cli import main as lengthwise

STEPS, RANKS = 8, (1, 2, 3)
LONGEST_SECONDS = 120.0  # that any run may take before it counts as hung
TIMEOUT_SECONDS = 3.0  # of a rank that waits for a stopped one


def write_run(
    folder: Path, rows: Sequence[Sequence[int]], *, vocab: int, hidden: int, layers: int, **more: Any
) -> Path:
    """Write a small Llama's config, its data and the file of a run of them; return that."""
    model, data, run = folder / "model", folder / "train.jsonl", folder / "run.json"
    model.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows), encoding="utf-8")
    values = {
        "model": str(model), "weights": "fresh", "data": [{"path": str(data)}], "global_batch": {"sequences": 4},
        "device": "cpu", "output": str(folder / "out"), **more,
    }  # fmt: skip
    run.write_text(json.dumps(values), encoding="utf-8")
    return run


def living_children(pid: int) -> list[int]:
    """Return the children of a process's first thread that have not ended."""
    alive = list[int]()
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split():
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{child}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
                alive += [] if state in "ZX" else [int(child)]
    return alive


class Failure(Exception):  # noqa: N818 - the name says what happened
    """What a trial found that is not promised."""


class Started:
    """A command in a session of its own, forked from this process to spare it the imports."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self._log = folder / "log.txt"
        self.pid = os.fork()
        if not self.pid:
            self._become(list(map(str, arguments)))

    def _become(self, arguments: list[str]) -> None:
        status = 99
        try:
            os.setsid()
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            import torch

            torch.set_num_threads(1)  # before it has threads, which would find the pool of before the fork
            lengthwise(arguments)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 0
        except BaseException:  # noqa: BLE001 - told as the interpreter would
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    def end(self) -> tuple[int, str]:
        """Wait for its end and that of all its processes; return status and what it said."""
        end = time.monotonic() + LONGEST_SECONDS
        status = None
        while status is None and time.monotonic() < end:
            pid, ended = os.waitpid(self.pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(ended) if pid else None
            time.sleep(0.01)
        left = self._left(end)
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        said = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        if status is None:
            os.waitpid(self.pid, 0)
            raise Failure(f"hung: {said[-300:]}")
        if left:
            raise Failure("processes were left")
        if "Traceback" in said:
            raise Failure(f"traceback: {said[-300:]}")
        return status, said

    def _left(self, end: float) -> bool:
        """Whether a process of its group is there some seconds after it."""
        end = min(end, time.monotonic() + 10.0)
        while time.monotonic() < end:
            try:
                os.killpg(self.pid, 0)
            except OSError:
                return False
            time.sleep(0.02)
        return True


class Trials:
    """Small runs in one folder, and what undisturbed ones end with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        draw = random.Random(7)
        rows = [[draw.randrange(64) for _ in range(length)] for length in (30, 12, 5, 40, 1, 2, 33, 17, 9)]
        saves = {"every_steps": 2, "keep_last": 2}
        asked: dict[str, Any] = {"steps": STEPS, "capacity_tokens": 48, "precision": "fp64", "checkpoint": saves}
        self.run_file = write_run(folder, rows, vocab=64, hidden=32, layers=2, **asked)
        self.seconds: dict[int, float] = {}
        self.made_again: list[int] = []  # steps, for each kill
        self._ends: dict[int, str] = {}
        for ranks in RANKS:
            start = time.monotonic()
            self.must_end(ranks)
            self.seconds[ranks] = time.monotonic() - start
            self._ends[ranks] = self._state()

    @property
    def output(self) -> Path:
        """Where runs write."""
        return self.folder / "out"

    def clear(self) -> None:
        """Remove what an earlier trial left."""
        shutil.rmtree(self.output, ignore_errors=True)

    def start(self, ranks: int, *more: object) -> Started:
        """Start a run, or go on with it."""
        return Started(self.folder, "train", self.run_file, "--ranks", ranks, *more)

    def must_end(self, ranks: int, *more: object) -> str:
        """Run to the end; return what was said."""
        status, said = self.start(ranks, *(more or ("--overwrite",))).end()
        if status:
            raise Failure(f"status {status}: {said[-300:]}")
        return said

    def check_end(self, ranks: int) -> None:
        """Compare model and ledger with those of an undisturbed run, to the bit."""
        if self._state() != self._ends[ranks]:
            raise Failure("ended with other bits than an undisturbed run")

    def checkpoints(self) -> list[Path]:
        """Return the committed checkpoints, the newest last."""
        there = (self.output / "checkpoints").glob("step-*")
        return sorted(each for each in there if not each.name.endswith(".unfinished"))

    def steps_done(self) -> int:
        """Count the steps that a run wrote down."""
        metrics = self.output / "metrics.jsonl"
        return metrics.read_text(encoding="utf-8").count("\n") if metrics.exists() else 0

    def _state(self) -> str:
        found = hashlib.sha256((self.output / "ledger.jsonl").read_bytes())
        for path in sorted((self.output / "model").glob("*.safetensors")):
            found.update(path.read_bytes())
        return found.hexdigest()


def kill(trials: Trials, draw: random.Random) -> str:
    """Kill the run or one of its ranks, once or more often, and let it go on."""
    ranks, options, outcomes = draw.choice(RANKS), ("--overwrite",), list[str]()
    trials.clear()
    while True:
        started = trials.start(ranks, *options)
        time.sleep(draw.random() * trials.seconds[ranks])
        with contextlib.suppress(OSError):
            os.kill(draw.choice([started.pid, *living_children(started.pid)]), signal.SIGKILL)
        status, _said = started.end()
        if (trials.output / "model").exists() and status:
            trials.check_end(ranks)
        newest = trials.checkpoints()
        lost = trials.steps_done() - int(newest[-1].name[5:]) if newest else 0
        trials.made_again.append(lost if newest else trials.steps_done())
        if lost > 4:  # two of the interval, and two of the checkpoint that was under way
            raise Failure(f"{lost} steps were lost")
        options = ("--resume",) if newest else ("--overwrite",)
        if status == 0:
            outcomes.append("too late")
            break
        outcomes.append("with a checkpoint" if newest else "before the first checkpoint")
        if draw.random() < 0.6:
            trials.must_end(ranks, *options)
            break
    trials.check_end(ranks)
    return "killed too late" if outcomes == ["too late"] else "went on to the same bits"


def stop(trials: Trials, draw: random.Random) -> str:
    """Stop a rank for good; it must be named within the time-out and five seconds, and the run must go on after."""
    ranks = draw.choice([each for each in RANKS if each > 1])
    trials.clear()
    started = trials.start(ranks, "--overwrite", "--timeout-seconds", TIMEOUT_SECONDS)
    after, end = draw.randrange(STEPS - 1), time.monotonic() + LONGEST_SECONDS
    while trials.steps_done() < after and time.monotonic() < end:
        time.sleep(0.002)
    there = living_children(started.pid)
    stopped = time.monotonic()
    if there:
        with contextlib.suppress(OSError):
            os.kill(draw.choice(there), signal.SIGSTOP)
    status, said = started.end()
    if status == 0:
        return "stopped too late"
    if time.monotonic() - stopped > TIMEOUT_SECONDS + 5.0:
        raise Failure(f"told after {time.monotonic() - stopped:.1f} s")
    if "last seen in" not in said:
        raise Failure(f"nobody named: {said[-300:]}")
    trials.must_end(ranks, "--resume" if trials.checkpoints() else "--overwrite")
    trials.check_end(ranks)
    return "named in time, went on to the same bits"


def damage(path: Path, draw: random.Random) -> None:
    """Flip a bit, cut the file off, lose a block, take that file of the other checkpoint, or lose the file."""
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content))
    match draw.choice(("flip", "flip", "flip", "cut", "zero", "swap", "lose")):
        case "flip":
            content[place] ^= 1 << draw.randrange(8)
        case "cut":
            del content[place:]
        case "zero":
            while not any(content[place : place + 512]):
                place -= 1
            content[place : place + 512] = bytes(len(content[place : place + 512]))
        case "swap":
            (other,) = (each for each in path.parent.parent.glob("step-??????") if each != path.parent)
            if (other / path.name).exists():
                content = (other / path.name).read_bytes()
        case _:
            path.unlink()
            return
    path.write_bytes(content)


def corrupt(trials: Trials, draw: random.Random, saved: dict[int, Path]) -> str:
    """Damage a checkpoint, or two; the run must name it and train nothing, or go on from a whole one."""
    ranks = draw.choice(RANKS)
    trials.clear()
    shutil.copytree(saved[ranks], trials.output)
    for checkpoint in trials.checkpoints()[-draw.choice((1, 1, 1, 2)) :]:
        damage(draw.choice(sorted(checkpoint.iterdir())), draw)
    steps = trials.steps_done()
    status, said = trials.start(ranks, "--resume").end()
    if status == 0:
        trials.check_end(ranks)
        return "passed over, went on to the same bits" if "passed over" in said else "changed nothing, the same bits"
    if "checkpoints" not in said or trials.steps_done() != steps or (trials.output / "model").exists():
        raise Failure(f"status {status}, trained or not named: {said[-300:]}")
    return "refused by name, nothing trained"


def hostile(trials: Trials, draw: random.Random) -> str:
    """Change some bytes of run file, model config or data; the run must train, or refuse it in words."""
    path = draw.choice([trials.run_file, *(trials.folder / name for name in ("model/config.json", "train.jsonl"))])
    before = path.read_bytes()
    changed = bytearray(before)
    for _ in range(draw.choice((1, 1, 2, 8))):
        place, part = draw.randrange(len(changed)), bytes(draw.choices(b'0919{}[]",:.-eE\x00\xff\n tfn', k=3))
        changed[place : place + draw.randrange(3)] = part[: draw.randrange(4)]
    try:
        path.write_bytes(changed)
        status, said = trials.start(1, "--overwrite", "--set", f"output={trials.output}", "--set", "steps=2").end()
    finally:
        path.write_bytes(before)
    if status not in (0, 1, 2) or (status and "error[" not in said and "┌" not in said and "╭" not in said):
        raise Failure(f"status {status}: {said[-300:]}")
    return "trained" if status == 0 else "refused in words"


def saved_runs(trials: Trials) -> Iterator[tuple[int, Path]]:
    """Keep the folder of a run that was killed after step 4, with checkpoints of 2 and 4, for each number of ranks."""
    for ranks in RANKS:
        os.environ[VARIABLE] = f"microbatches:{ranks - 1}:7:kill"
        trials.start(ranks, "--overwrite").end()
        del os.environ[VARIABLE]
        kept = trials.folder / f"saved-{ranks}"
        if len(trials.checkpoints()) != 2:
            raise SystemExit(f"durability: expected two checkpoints of the run to damage, got {trials.checkpoints()}")
        shutil.copytree(trials.output, kept)
        yield ranks, kept
