"""The checks of a GPU machine without one: tables run tiny, what fails or hangs stops no other, a page is made."""

import os
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

import gpu_check
from gpu import many, steps, tables
from gpu.limits import MARGIN, PARTS
from gpu.many import CONFIGURATIONS
from gpu.rows import TITLES, Records, page_of, read_rows
from gpu.setting import sizes_of
from lengthwise.attention import ReferenceKernel
from lengthwise.comm.devices import Gpus

pytest_plugins = "pytester"
PAGE = "# Page\n" + gpu_check.MARK + "\nold rows\n"
OPTIONS = ("--device", "cpu", "--tiny")


@pytest.fixture(autouse=True)
def _environment_is_put_back(monkeypatch):
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    for name in ("PYTHONPATH", *offline, "LENGTHWISE_TEST_GPU", "LENGTHWISE_TRANSPORT_WRAPPER"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def check(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *map(str, arguments)])
    gpu_check.main()


def python(code):
    return [sys.executable, "-S", "-c", code]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch.compile's own import
def test_all_tables_run_tiny_on_the_cpu_and_make_the_page(tmp_path, monkeypatch):
    folder, page = tmp_path / "found", tmp_path / "page.md"
    page.write_text(PAGE)
    names = set(gpu_check.TABLES) - {"many"}  # of many processes
    check(monkeypatch, *names, "--here", "--out", folder, "--page", page, *OPTIONS)
    text, found = page.read_text(), {row["table"] for row in read_rows(folder)}
    for table, title in TITLES.items():
        if table in ("part", "many"):
            continue
        assert table in found
        assert f"### {title}\n" in text
    for plan in folder.glob("replay-*-*.json"):
        assert f"| {plan.name} |" in text


@pytest.mark.exhaustive
def test_tables_and_files_of_tests_run_by_their_command_lines(tmp_path, monkeypatch):
    for name in ("place", "test_gpu_kernels"):
        monkeypatch.setitem(PARTS, name, replace(PARTS[name], limit_seconds=600))  # of a busy machine
    check(monkeypatch, "place", "test_gpu_kernels", "--out", tmp_path, *OPTIONS)
    assert "1 passed" in (tmp_path / "test_gpu_kernels.log").read_text()
    assert {row["table"] for row in read_rows(tmp_path)} == {"place", "end", "part"}


def test_what_fails_or_hangs_stops_no_other_part(tmp_path, monkeypatch, capsys):
    codes = {
        "place": "raise SystemExit('broken on purpose')",
        "ceilings": "import os, time\nos.fork()\ntime.sleep(60)",
        "steps": "print('fine')",
    }
    monkeypatch.setattr(gpu_check, "command_of", lambda name, _: python(codes[name]))
    monkeypatch.setitem(PARTS, "ceilings", replace(PARTS["ceilings"], limit_seconds=0.5))
    start = time.monotonic()
    with pytest.raises(SystemExit, match="gpu_check: place, ceilings failed"):
        check(monkeypatch, *codes, "--out", tmp_path, *OPTIONS)
    assert time.monotonic() - start < 30
    ended = {row["name"]: row["ended"] for row in read_rows(tmp_path)}
    assert ended == {"place": "status 1", "ceilings": "time limit", "steps": "ok"}
    assert "broken on purpose" in capsys.readouterr().out


def test_without_a_gpu_the_reason_comes_first_and_nothing_runs(tmp_path, monkeypatch, capsys):
    why = "The NVIDIA driver on your system is too old (found version 12080)"
    monkeypatch.setattr(gpu_check, "find_gpus", lambda: Gpus(number=0, why_none=why))
    with pytest.raises(SystemExit) as ended:
        check(monkeypatch, "place", "test_gpu_kernels", "--out", tmp_path / "found")
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"gpu_check: torch starts no GPU: {why}. ")
    assert not said.out
    assert not (tmp_path / "found").exists()


def test_a_skip_fails_where_a_gpu_was_asked_for(pytester, monkeypatch):
    conftest = (gpu_check.ROOT / "tests" / "gpu" / "conftest.py").read_text()
    pytester.makeconftest(conftest.replace("torch.cuda.is_available()", "False"))
    pytester.makepyfile("def test_it(device):\n    pass")
    options = ("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestUnknownMarkWarning")
    monkeypatch.delenv("LENGTHWISE_TEST_GPU")
    pytester.runpytest_inprocess(*options).assert_outcomes(passed=1, skipped=1)
    monkeypatch.setenv("LENGTHWISE_TEST_GPU", "1")
    found = pytester.runpytest_inprocess(*options)
    found.assert_outcomes(passed=1, errors=1)
    found.stdout.fnmatch_lines(["*test_it?cuda? was skipped, where every case must run: *no GPU (make gpu-check)*"])


def test_parts_fit_their_limits_and_the_page_says_them():
    sizes, page = sizes_of("cuda", tiny=False), (gpu_check.ROOT / "docs" / "gpu.md").read_text()
    for name, part in PARTS.items():
        assert 0 < part.estimate(sizes) <= MARGIN * part.limit_seconds, name
        assert re.search(rf"^\| `{name}` \| {part.limit_seconds:g} s \| ", page, re.MULTILINE), name
    minutes = re.search(r"in at most (\d+) minutes", page)
    assert sum(part.limit_seconds for part in PARTS.values()) <= 60 * int(minutes.group(1))
    said = gpu_check.expected_lines(["place", "replay"], SimpleNamespace(device="cuda", tiny=False))
    said_of = (
        f"about {PARTS['replay'].estimate(sizes):.0f} s, at most 250 s; whether the simulator's step times are right"
    )
    assert said[1].startswith(f"replay: {said_of}")
    assert list(PARTS)[-1] == "replay"
    commands = [re.findall(r"\w+", line) for line in re.findall(r"gpu_check.py (\w[^`]*?) --out", page)]
    assert sorted(name for each in commands for name in each) == sorted(PARTS)
    for each in commands:
        assert sum(PARTS[name].limit_seconds for name in each) <= 600


class WrongKernel(ReferenceKernel):
    """Forgets a tenth of the values' gradient."""

    def backward(self, grad_out, block, saved):
        dq, dk, dv = super().backward(grad_out, block, saved)
        return dq, dk, dv * 0.9


def test_a_wrong_kernel_fails_the_parity_part(tmp_path, monkeypatch):
    kernel = WrongKernel()
    monkeypatch.setattr(tables, "choose_kernel", lambda *_, **__: kernel)
    with pytest.raises(SystemExit, match=r"over the tolerance: ring$"):
        tables.parity(sizes_of("cpu", tiny=True), Records(tmp_path, "parity"))
    assert [row["passed"] for row in read_rows(tmp_path)] == [False, True]


TINY = sizes_of("cpu", tiny=True)


def test_a_loop_with_another_loss_fails_its_part(tmp_path, monkeypatch):
    def rows(_, turn, batches):
        loss = 5.01 if turn.loop == steps.LIGER else 5.001
        return [(kind, {"all_seconds": [1.0, 1.0], "first_loss": loss, "said": []}) for kind in batches]

    monkeypatch.setattr(steps, "_rows_of", rows)
    with pytest.raises(SystemExit, match=r"^steps_8b: lengthwise, Liger raised, or had another loss"):
        steps.steps(TINY, Records(tmp_path, "steps_8b"), "steps_8b")
    found = {row["loop"]: row["loss_difference"] for row in read_rows(tmp_path) if row["table"] == "step"}
    assert found[steps.LIGER] == pytest.approx(0.0018, rel=0.01)
    assert found[steps.PACKED] == 0


@pytest.mark.exhaustive
def test_all_configurations_run_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(many, "COMMAND_LIMIT_SECONDS", 300.0)
    many.many(TINY, Records(tmp_path, "many"))
    rows = read_rows(tmp_path)
    assert [row["configuration"] for row in rows] == list(CONFIGURATIONS)
    assert all(row["first_loss"] > row["last_loss"] for row in rows)
    assert f"### {TITLES['many']}\n" in page_of(rows)
