"""Check the archives of a release, `make dist`: the files that git has, one version everywhere, and no tests."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(folder: Path) -> None:
    """Raise AssertionError for archives in `folder` that a user should not install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project["version"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    own = re.search(r'__version__ = "(.+)"', (ROOT / "src/lengthwise/core/__init__.py").read_text(encoding="utf-8"))
    assert {found and found[1] for found in (cited, own)} == {version}, f"versions differ from {version}"
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), f"CHANGELOG has no {version}"

    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    package = {each.removeprefix("src/") for each in listed if each.startswith("src/")}
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (each for each in names if each.endswith(".dist-info/METADATA"))
        said = archive.read(metadata).decode()
    beside = {each for each in names if not each.startswith(f"lengthwise-{version}.dist-info/")}
    assert beside == package, f"wheel and git differ: {sorted(beside ^ package)[:5]}"
    for line in (
        f"Version: {version}",
        "License-Expression: Apache-2.0",
        f"Requires-Python: {project['requires-python']}",
    ):
        assert line in said.splitlines(), f"METADATA lacks {line}"
    with tarfile.open(source) as archive:
        held = {each.partition("/")[2] for each in archive.getnames()}
    missing = {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", *(f"src/{each}" for each in package)} - held
    assert not missing, f"the source archive lacks {sorted(missing)[:5]}"
    print(f"{wheel.name}: {len(package)} files, {wheel.stat().st_size / 1e6:.1f} MB; {source.name}: {len(held)} files")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
