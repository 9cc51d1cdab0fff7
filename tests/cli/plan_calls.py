"""`lengthwise plan` as tests call it: what it wrote, and where it refuses."""

from lengthwise.core.plan import Plan
from lengthwise.program import check_plan
from run.small_runs import call


def read_plan(path):
    plan = Plan.from_json(path.read_text())
    check_plan(plan)
    return plan


def refused(capfd, *arguments, code=2):
    assert call("plan", *arguments) == code
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert "defect" not in err
    return err
