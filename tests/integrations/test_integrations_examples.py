"""Each example says what its plain form says, on one process and on two; the pages show the change."""

import contextlib
import difflib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from testing.small import relative
from trainers import in_trainers

from tiers import some

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = {
    "own_loop": "session.md", "trainer": "trainer.md", "lora": "trainer.md", "sft": "trainer.md",
    "dpo": "trainer.md", "sft_images": "guides/images.md", "grpo": "trainer.md",
}  # fmt: skip
ADDED_LINES = 8
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated"),  # TRL and peft read it
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated"),
]


def said(example, ranks, folder):
    """Return the losses and norms that an example prints on so many ranks."""

    def work(_rank):
        os.chdir(folder)
        sys.path.insert(0, str(EXAMPLES))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
        return printed.getvalue()

    return numbers(in_trainers(work, ranks, folder)[0])


def numbers(text):
    return [float(each) for each in re.findall(r"\b(?:loss|grad_norm|norm)'?:? '?([\d.e-]+\d)", text)]


@pytest.mark.parametrize("example", some(PAGES, 0, 3))
def test_an_example_says_what_its_plain_form_says(example, tmp_path):
    expected = said(f"{example}_plain", 1, tmp_path)
    assert len(expected) >= 6
    found = said(example, 2, tmp_path)
    assert len(found) == len(expected)
    assert max(map(relative, found, expected)) < 1e-3  # four digits are printed


@pytest.mark.parametrize("example", PAGES)
def test_the_page_shows_what_differs(example):
    before, after = ((EXAMPLES / f"{name}.py").read_text().splitlines()[1:] for name in (f"{example}_plain", example))
    compared = difflib.unified_diff(before, after, lineterm="", n=0)
    differs = [line for line in compared if line[:2] not in ("--", "++", "@@")]
    shown = [
        [line for line in block.splitlines() if line[:1] in ("+", "-")]
        for block in re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / PAGES[example]).read_text(), re.DOTALL)
    ]
    assert any(sorted(differs) == sorted(each) for each in shown), "\n".join(differs)
    assert sum(line.startswith("+") for line in differs) <= ADDED_LINES
