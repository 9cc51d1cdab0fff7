import pytest

import loader


def test_kind_compares_each_block_with_its_neighbour() -> None:
    kind = loader.Kind([((2.0, 0.3), (1.0, 0.1)), ((3.0, 0.2), (2.0, 0.1)), ((8.0, 0.1), (8.0, 0.1))])
    assert kind.ratios == [2.0, 1.5, 1.0]
    assert kind.medians == pytest.approx((3.0, 2.0, 0.1))
    rows = list(loader.table({loader.WARM: kind, loader.COLD: kind}))
    assert rows[-1] == "prepared, cold: 1.500 (aim 1.02: **missed**)."


@pytest.mark.exhaustive
def test_blocks_run_from_prepared_rows_and_from_memory(tmp_path, capfd) -> None:
    store, made = loader.prepared_store(tmp_path, 500)
    assert "500 sequences" in capfd.readouterr().out
    assert made.startswith("prepared from Parquet")
    assert loader.prepared_store(tmp_path, 500) == (store, "found from before")
    job = loader.opened(store, 256)
    assert len(job.dataset.lengths) == 500
    found = loader.measured(loader.Loops(job, 1), store, 1)
    assert list(found) == list(loader.KINDS)
    for kind in found.values():
        [(ours, memory)] = kind.blocks
        assert ours[0] >= ours[1] > 0
        assert memory[0] > memory[1] > 0
