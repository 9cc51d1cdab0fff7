"""Files that several tests of commands take."""

import pytest


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text("[5, 70, 9]")
    return path
