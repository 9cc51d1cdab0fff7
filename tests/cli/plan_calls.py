"""`lengthwise plan` as tests call it: where torch is missing, where it refuses, and what it wrote."""

import subprocess
import sys

from lengthwise.core.plan import Plan
from lengthwise.program import check_plan
from run.small_runs import call

WITHOUT = """
import sys

class Absent:  # as on a machine where they are not installed
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "transformers", "safetensors", "tokenizers", "huggingface_hub"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
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
