"""What several tests of data take."""

import json

import pytest

ROWS = {"train": [{"text": "x" * n} for n in (3, 1, 40)], "test": [{"text": "y" * n} for n in (5, 2)]}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The folder of a dataset by name, as `datasets` finds it without a network."""
    import datasets

    folder = tmp_path / "org/name"
    folder.mkdir(parents=True)
    for split, rows in ROWS.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "kept"))
    monkeypatch.chdir(tmp_path)
    return folder
