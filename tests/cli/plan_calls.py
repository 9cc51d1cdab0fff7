"""`lengthwise plan` as tests call it: where torch is missing, where it refuses, and what it wrote."""

import subprocess
import sys

from lengthwise.core.plan import Plan
from lengthwise.program import check_plan
from run.small_runs import call

WITHOUT = """
import sys

HIDDEN = {"torch", "transformers", "safetensors", "tokenizers"}

class Hiding:  # as on a machine where they are not installed
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *more):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, *more)

sys.meta_path[:] = map(Hiding, sys.meta_path)
from lengthwise.cli import main
main(sys.argv[1:])
"""


def plan_without_torch(*arguments):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT, "plan", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


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
