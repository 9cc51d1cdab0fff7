"""Runs that several tests go on with."""

import shutil

import pytest

from run.small_runs import broken_off
from run.test_run_resume import run_of


@pytest.fixture(scope="session")
def _broken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    broken_off(run_of(folder / "run"), 2, after=5)
    (folder / "run").rename(folder / "kept")
    return folder


@pytest.fixture
def broken(_broken):
    """Return the run file of a run on 2 ranks that broke off after step 5 of 7; its newest checkpoint is of step 4."""
    shutil.rmtree(_broken / "run", ignore_errors=True)  # at the same place each time: its data have this path
    shutil.copytree(_broken / "kept", _broken / "run")
    return _broken / "run/run.yaml"
