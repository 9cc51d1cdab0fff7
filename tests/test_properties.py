"""Profiles of the property-based tests: the numbers that the page gives, reached by every test."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from properties import costliest, costly

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "architecture.md"
ROW = r"^ *\| `(\w+)`[^|]*\| (\d+) \| (\d+) \| (\d+) \| (.+) every time \|$"
ROWS = re.findall(ROW, PAGE.read_text(encoding="utf-8"), re.MULTILINE)
DOCUMENTED = {name: ([int(cases) for cases in counts], new == "new") for name, *counts, new in ROWS}
NUMBERED = "max" + "_examples"
NAMERS = (TESTS / "conftest.py", TESTS / "properties.py")
PROPERTY = """
from hypothesis import given, strategies
from properties import costly

@costly
@given(strategies.integers())
def test_property(number):
    print("tried")
"""


@pytest.fixture
def load():
    before = settings.get_current_profile_name()
    yield settings.load_profile
    settings.load_profile(before)


def plain(test):
    return test


def cases_of(mark) -> list[int]:
    """Return the cases that a property with such a mark is tried on."""
    tried = []

    @mark
    @given(st.integers())
    def try_case(number):
        tried.append(number)

    try_case()
    return tried


@pytest.mark.parametrize("profile", ["ci", "full", "search"])
def test_profile_gives_the_cases_that_the_page_says(load, profile: str) -> None:
    load(profile)
    counts, new = DOCUMENTED[profile]
    first, second = ([cases_of(mark) for mark in (plain, costly, costliest)] for _ in range(2))
    assert [len(cases) for cases in first] == [len(cases) for cases in second] == counts
    assert (first != second) == new


def test_search_tries_every_property_on_five_times_the_cases_of_ci_or_more() -> None:
    ci, search = DOCUMENTED["ci"][0], DOCUMENTED["search"][0]
    assert all(many >= 5 * few for few, many in zip(ci, search, strict=True))


def run_property(profile: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "test_property.py").write_text(PROPERTY, encoding="utf-8")
    environment = {**os.environ, "HYPOTHESIS_PROFILE": profile, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull]
    return subprocess.run([*command, str(folder)], capture_output=True, text=True, env=environment, cwd=folder)


def test_profile_is_the_one_that_the_environment_names(tmp_path: Path) -> None:
    done = run_property("search", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("tried") == DOCUMENTED["search"][0][1]


def test_unknown_profile_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    done = run_property("serach", tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    told = (done.stdout + done.stderr).strip()
    assert told == "ERROR: HYPOTHESIS_PROFILE: expected one of ci, full, search; got 'serach'"


def test_no_test_writes_a_number_of_cases() -> None:
    """A number of its own would keep a property from following the profile."""
    others = sorted(set(TESTS.rglob("*.py")) - set(NAMERS))
    assert len(others) > 100
    assert [str(path.relative_to(TESTS)) for path in others if NUMBERED in path.read_text(encoding="utf-8")] == []
