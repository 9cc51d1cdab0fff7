"""The checks of a GPU machine without one: tables run tiny, what fails or hangs stops no other, a page is made."""

import os
import sys
import time

import pytest

import gpu_check
from gpu import tables
from gpu.rows import TITLES, Records, read_rows
from gpu.setting import sizes_of
from lengthwise.attention import ReferenceKernel

PAGE = "# Page\n" + gpu_check.MARK + "\nold rows\n"
TINY = ("--device", "cpu", "--tiny")


@pytest.fixture(autouse=True)
def _environment_is_put_back(monkeypatch):
    for name in ("PYTHONPATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "LENGTHWISE_TEST_GPU"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def check(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *map(str, arguments)])
    gpu_check.main()


def python(code):
    return [sys.executable, "-S", "-c", code]


@pytest.mark.exhaustive
def test_all_tables_run_tiny_on_the_cpu_and_make_the_page(tmp_path, monkeypatch):
    folder, page = tmp_path / "found", tmp_path / "page.md"
    page.write_text(PAGE)
    check(monkeypatch, *gpu_check.TABLES, "--here", "--out", folder, "--page", page, *TINY)
    text, found = page.read_text(), {row["table"] for row in read_rows(folder)}
    for table, title in TITLES.items():
        if table == "part":
            continue
        assert table in found
        assert f"### {title}\n" in text
    for plan in folder.glob("replay-*-*.json"):
        assert f"| {plan.name} |" in text


@pytest.mark.exhaustive
def test_tables_and_files_of_tests_run_by_their_command_lines(tmp_path, monkeypatch):
    check(monkeypatch, "place", "test_gpu_kernels", "--out", tmp_path, *TINY)
    assert "1 passed" in (tmp_path / "test_gpu_kernels.log").read_text()
    assert {row["table"] for row in read_rows(tmp_path)} == {"place", "end", "part"}


def test_what_fails_or_hangs_stops_no_other_part(tmp_path, monkeypatch, capsys):
    codes = {
        "place": "raise SystemExit('broken on purpose')",
        "ceilings": "import os, time\nos.fork()\ntime.sleep(60)",
        "steps": "print('fine')",
    }
    monkeypatch.setattr(gpu_check, "command_of", lambda name, _: python(codes[name]))
    monkeypatch.setitem(gpu_check.TABLES, "ceilings", 0.5)
    start = time.monotonic()
    with pytest.raises(SystemExit, match="gpu_check: place, ceilings failed"):
        check(monkeypatch, *codes, "--out", tmp_path, *TINY)
    assert time.monotonic() - start < 30
    ended = {row["name"]: row["ended"] for row in read_rows(tmp_path)}
    assert ended == {"place": "status 1", "ceilings": "time limit", "steps": "ok"}
    assert "broken on purpose" in capsys.readouterr().out


def test_a_page_is_made_from_partial_results(tmp_path):
    folder, page = tmp_path / "found", tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(SystemExit, match="nothing was written"):
        gpu_check.write_page(folder, page)
    assert page.read_text() == PAGE
    Records(folder, "ceilings").add("copy", moved_bytes_per_second=4.3e12, seconds=0.001, spread=0.02)
    with (folder / "ceilings.jsonl").open("a") as file:
        file.write('{"table": "copy", "secon')  # killed here
    assert not gpu_check.run_part("fails", python("raise SystemExit(3)"), 60, folder)
    gpu_check.write_page(folder, page)
    text = page.read_text()
    assert text.startswith("# Page\n" + gpu_check.MARK)
    assert "old rows" not in text
    assert "| 4300GB/s | 0.001 | 2.0 % |" in text
    assert "status 3" in text
    page.write_text("# No mark\n")
    with pytest.raises(SystemExit, match="expected the line"):
        gpu_check.write_page(folder, page)


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "count_gpus", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        check(monkeypatch, "place", "--here", "--out", tmp_path / "found")
    assert ended.value.code == 2
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "found").exists()


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
