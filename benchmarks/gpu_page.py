"""The page of a GPU from what the scripts of `gpu_check.py` wrote into a folder, also where only some of them ran.

    python benchmarks/gpu_page.py [FOLDER] [--out docs/gpu.md]

What stands below the mark of the page is replaced.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "src"))

from gpu.page import page_of
from gpu.records import read_rows

MARK = "<!-- what follows is written by benchmarks/gpu_page.py -->\n"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/gpu"), metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("docs/gpu.md"), metavar="PAGE")
    arguments = parser.parse_args()
    before, mark, _ = arguments.out.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise SystemExit(f"{arguments.out}: expected the line {MARK.strip()}; nothing was written")
    rows = read_rows(arguments.folder)
    if not rows:
        raise SystemExit(f"{arguments.folder}: expected rows of gpu_check.py; nothing was written")
    arguments.out.write_text(f"{before}{mark}\n{page_of(rows)}", encoding="utf-8")


if __name__ == "__main__":
    main()
