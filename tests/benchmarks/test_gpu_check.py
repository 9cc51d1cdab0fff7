"""The scripts of a GPU machine without one: all parts run tiny, what fails or hangs stops no other, a page is made."""

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import time

import pytest
import torch

import gpu_check
import gpu_page
import gpu_step
from gpu import parts
from gpu.models import draw_model
from gpu.page import TITLES
from gpu.parts import Part, run_parts
from gpu.records import Records, middle, read_rows

PAGE = "# Page\n" + gpu_page.MARK + "\nold rows\n"


def part(name, code, *, limit_seconds=60.0):
    return Part(name=name, command=(sys.executable, "-S", "-c", code), limit_seconds=limit_seconds, environment={})


def call(module, monkeypatch, *arguments):
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # which a table sets
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


class Forked:
    """What `subprocess.Popen` gives, for tables: forked from this process, which spares each of them the imports.

    A file of tests ends at once, a table that is not there takes for ever.
    """

    def __init__(self, command, *, stdout, stderr, env, start_new_session):
        assert start_new_session
        arguments = (list(command), stdout.fileno(), env)
        self._process = multiprocessing.get_context("fork").Process(target=self._become, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    @staticmethod
    def _become(command, log, environment):
        torch.set_num_threads(1)  # before it has threads: the first two would mend the forked thread pool at once
        os.setsid()
        for number in (1, 2):
            os.dup2(log, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        os.environ.update(environment)
        sys.argv = command[1:]
        if "hangs" in command:
            time.sleep(60)
        if "pytest" not in command:
            gpu_step.main()

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked", timeout)
        return self._process.exitcode


@pytest.mark.exhaustive
def test_all_four_scripts_run_tiny_on_the_cpu_and_make_the_page(tmp_path, monkeypatch):
    """With a part that fails, an unknown table, and one that runs into its time limit; nothing stops for them."""
    scripts = {name: dict(parts) for name, parts in gpu_check.SCRIPTS.items()}
    assert len(scripts) == 4
    scripts["contact"] |= {"no such table": 60.0, "hangs": 0.3}
    monkeypatch.setattr(gpu_check, "SCRIPTS", scripts)
    monkeypatch.setattr(parts, "Popen", Forked)
    for module in filter(None, gpu_step.TABLES.values()):  # once, for all that are forked
        importlib.import_module(module)
    draw_model("tiny", torch.device("cpu"))
    folder, page = tmp_path / "found", tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(SystemExit, match="gpu_check: no such table, hangs failed"):
        call(gpu_check, monkeypatch, "all", "--out", folder, "--device", "cpu", "--tiny")
    rows = read_rows(folder)
    ended = {row["name"]: row["ended"] for row in rows if row["table"] == "part"}
    assert ended.pop("no such table") == "status 2"
    assert ended.pop("hangs") == "time limit"
    assert set(ended.values()) == {"ok"}
    assert set(gpu_step.TABLES) <= set(ended)
    call(gpu_page, monkeypatch, folder, "--out", page)
    text = page.read_text()
    tables = {row["table"] for row in rows}
    for table, title in TITLES.items():
        assert table in tables
        assert f"### {title}\n" in text
    for plan in folder.glob("replay-*-*.json"):
        assert f"| {plan.name} |" in text


@pytest.mark.exhaustive
def test_what_fails_or_hangs_stops_no_other_part(tmp_path, capsys):
    forks = "import os, time\nos.fork()\ntime.sleep(60)"
    made = [
        part("first", "print('fine')"),
        part("fails", "raise SystemExit('broken on purpose')"),
        part("hangs", forks, limit_seconds=0.5),
        part("last", "print('fine')"),
    ]
    start = time.monotonic()
    assert run_parts("contact", made, tmp_path) == ["fails", "hangs"]
    assert time.monotonic() - start < 30
    assert [row["ended"] for row in read_rows(tmp_path)] == ["ok", "status 1", "time limit", "ok"]
    assert "broken on purpose" in capsys.readouterr().out
    assert "broken on purpose" in (tmp_path / "fails.log").read_text()


def test_a_page_is_made_from_partial_results(tmp_path, monkeypatch):
    folder, page = tmp_path / "found", tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(SystemExit, match="nothing was written"):
        call(gpu_page, monkeypatch, folder, "--out", page)
    assert page.read_text() == PAGE
    Records(folder, "ceilings").add("copy", moved_bytes_per_second=4.3e12, seconds=0.001, spread=0.02)
    with (folder / "ceilings.jsonl").open("a") as file:
        file.write('{"table": "copy", "secon')  # killed here
    run_parts("contact", [part("fails", "raise SystemExit(3)")], folder)
    call(gpu_page, monkeypatch, folder, "--out", page)
    text = page.read_text()
    assert text.startswith("# Page\n" + gpu_page.MARK)
    assert "old rows" not in text
    assert "| 4300GB/s | 0.001 | 2.0 % |" in text
    assert "status 3" in text
    page.write_text("# No mark\n")
    with pytest.raises(SystemExit, match="expected the line"):
        call(gpu_page, monkeypatch, folder, "--out", page)


def test_scripts_take_ten_minutes_at_most_and_know_their_parts(tmp_path):
    for script, limits in gpu_check.SCRIPTS.items():
        assert sum(limits.values()) <= gpu_check.MOST_SECONDS, script
        for made in gpu_check.parts_of(script, tmp_path, device="cuda", tiny=False):
            assert any((gpu_check.ROOT / each).exists() for each in made.command[1:]), made
            assert made.name in gpu_step.TABLES or made.name.startswith("test_gpu_")


def test_a_script_ends_with_a_status_when_a_part_failed(tmp_path, monkeypatch):
    stubs = [part("fine", ""), part("broken", "raise SystemExit(3)")]
    monkeypatch.setattr(gpu_check, "parts_of", lambda *_, **__: stubs)
    with pytest.raises(SystemExit, match=", ".join(["broken"] * len(gpu_check.SCRIPTS))):
        call(gpu_check, monkeypatch, "all", "--out", tmp_path, "--device", "cpu", "--tiny")
    with pytest.raises(SystemExit, match="gpu_check: broken failed"):
        call(gpu_check, monkeypatch, "contact", "--out", tmp_path, "--device", "cpu", "--tiny")


@pytest.mark.exhaustive
def test_tests_run_by_their_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "_TINY_TESTS", {"test_gpu_kernels": "kernel_for"})
    made = gpu_check.parts_of("contact", tmp_path, device="cpu", tiny=True)
    assert run_parts("contact", [each for each in made if each.name == "test_gpu_kernels"], tmp_path) == []
    assert "1 passed" in (tmp_path / "test_gpu_kernels.log").read_text()


def test_packages_unpacked_on_the_path_stay_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/wheels")
    (made, *_) = gpu_check.parts_of("contact", tmp_path, device="cuda", tiny=False)
    *tree, last = made.environment["PYTHONPATH"].split(os.pathsep)
    assert last == "/wheels"
    assert [os.path.basename(each) for each in tree] == ["src", "benchmarks", "tests"]


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_step, "count_gpus", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        call(gpu_step, monkeypatch, "place", "--out", tmp_path / "found")
    assert ended.value.code == 2
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "found").exists()


def test_rows_say_the_spread_of_their_repeats(tmp_path):
    assert middle([2.0, 1.0, 4.0]) == {"seconds": 2.0, "spread": 1.5}
    records = Records(tmp_path, "some")
    records.add("one", tokens=3)
    assert json.loads((tmp_path / "some.jsonl").read_text()) == {"table": "one", "tokens": 3}
    Records(tmp_path, "some")
    assert read_rows(tmp_path) == []
