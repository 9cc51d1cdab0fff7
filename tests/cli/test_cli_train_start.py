"""What `lengthwise train` says before its first step."""

import pytest
from testing.small import make_rows

from lengthwise.cli.train import describe_job
from run.small_runs import call, job_of, write_run


def told(path, **options):
    job = job_of(path, **options)
    return job, describe_job(job)


def test_train_says_beforehand_how_long_it_will_take(tmp_path):
    path = write_run(tmp_path, make_rows([30, 12, 5, 40] * 8), capacity_tokens=40, steps=200)
    job, said = told(path)
    assert "time    not estimated: with so little work a step is mostly overhead; each step prints" in said
    assert 0 < job.estimated_step_seconds < 0.1
    more, _ = told(path, overrides=["global_batch.sequences=8"])
    assert more.estimated_step_seconds == 2 * job.estimated_step_seconds
    shared, _ = told(path, ranks=4)
    assert shared.estimated_step_seconds == job.estimated_step_seconds / 4


@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_train_says_when_nothing_was_trained(tmp_path, capsys, rate):
    path = write_run(tmp_path, make_rows([5, 6]), steps=1, optimizer={"lr": rate})
    assert call("train", path) == 0
    assert ("NOTHING WAS TRAINED" in capsys.readouterr().out) == (rate == 0)
