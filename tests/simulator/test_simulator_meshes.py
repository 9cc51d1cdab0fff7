"""The search of meshes: no worse than any mesh of its space, alike for all planners, and honest about what trains."""

from dataclasses import replace
from itertools import product

import pytest

from lengthwise.core.errors import ConfigError, LengthwiseError
from lengthwise.cost import named_hardware, named_shape
from lengthwise.data.recipes import draw_lengths
from lengthwise.simulator import (
    Mesh,
    MeshQuestion,
    best_mesh,
    best_meshes,
    on_one_mesh,
    stages_to_try,
    tensors_to_try,
)

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
BATCHES = [draw_lengths("github", 2**18, seed, 2**16) for seed in range(2)]
QUESTION = MeshQuestion(
    shape=SHAPE, hardware=HARDWARE, devices=16, context_tokens=2**16, tensors=(1, 2, 4, 8), kinds=("none", "layer")
)


@pytest.mark.parametrize("planner", ["static", "bytescale", "power-of-two"])
def test_search_ends_no_later_than_every_mesh_with_all_capacity(planner: str) -> None:
    """Every devices of a rank, with and without offload: the batch of most work decides, so a percent is left."""
    found = best_mesh(planner, BATCHES, QUESTION)
    assert found.any_mesh is not None
    for tensor, offload in product(QUESTION.tensors, ("off", "auto")):
        mesh = Mesh(tensor=tensor, heads="auto", offload=offload)
        other = on_one_mesh(mesh, planner, BATCHES, QUESTION).any_mesh
        assert other is not None
        assert found.any_mesh.result.mean_seconds <= 1.01 * other.result.mean_seconds, mesh
    assert found.tried <= 20


def test_what_trains_is_the_best_of_ranks_of_one_device() -> None:
    found = best_mesh("single-degree", BATCHES, QUESTION)
    narrow = best_mesh("single-degree", BATCHES, replace(QUESTION, tensors=(1,)))
    assert found.today is not None
    assert narrow.any_mesh is not None
    assert found.today.trains
    assert found.today.mesh == narrow.any_mesh.mesh
    assert found.today.result.mean_seconds == narrow.any_mesh.result.mean_seconds
    assert narrow.only_planned is None
    assert found.any_mesh is not None
    assert found.any_mesh.result.mean_seconds <= found.today.result.mean_seconds
    assert (found.only_planned is None) == (found.any_mesh.mesh == found.today.mesh)
    assert found.any_mesh.trains == (found.any_mesh.mesh.devices == 1)


def test_a_smaller_capacity_is_found_where_it_ends_sooner() -> None:
    """ByteScale cuts a sequence over the fewest ranks that hold it: with all capacity the longest takes two."""
    question = replace(QUESTION, tensors=(1,), kinds=("layer",), offload="off")
    batches = [[60_000] + [500] * 300]
    found = best_mesh("bytescale", batches, question).any_mesh
    whole = on_one_mesh(Mesh(heads="auto"), "bytescale", batches, question).any_mesh
    assert found is not None
    assert whole is not None
    assert found.mesh.capacity_share < 1
    assert found.result.mean_seconds < 0.8 * whole.result.mean_seconds


def test_pipelines_are_planned_as_such_and_do_not_train() -> None:
    question = replace(QUESTION, tensors=(2,), stages=(2,))
    found = best_mesh("bytescale", BATCHES[:1], question)
    assert found.today is None
    assert found.any_mesh is not None
    assert not found.any_mesh.trains
    assert found.any_mesh.result.first_plan.schedule["kind"] == "pipeline"
    assert question.trained_today() is None


def test_capacities_are_shares_of_what_fits_or_as_given() -> None:
    whole, half = (QUESTION.setting(Mesh(capacity_share=share)).capacities for share in (1.0, 0.5))
    assert whole is not None
    assert half is not None
    assert half == {kind: held // 2 // 128 * 128 for kind, held in whole.items()}
    given = replace(QUESTION, capacity_tokens=1000).setting(Mesh()).capacities
    assert given == {"none": 1000, "layer": 1000}
    with pytest.raises(ConfigError, match="room for 128 tokens"):
        replace(QUESTION, shape=named_shape("llama-70b")).setting(Mesh())


def test_nobody_holds_the_sequences_is_an_error_and_somebody_is_not() -> None:
    question = replace(QUESTION, devices=2, tensors=(1,), kinds=("none",), offload="off", capacity_tokens=8192)
    with pytest.raises(LengthwiseError, match="20000"):
        best_meshes(["static", "lengthwise"], [[20_000, 7]], question)
    alone = best_mesh("static", [[20_000, 7]], question)
    assert alone.any_mesh is None
    assert "20000" in str(alone.refusal)


def test_meshes_to_try_divide_devices_heads_and_layers() -> None:
    assert tensors_to_try(SHAPE, HARDWARE, 64) == (1, 2, 4, 8)
    assert tensors_to_try(SHAPE, HARDWARE, 12) == (1, 2, 4)
    assert tensors_to_try(replace(SHAPE, heads=12), HARDWARE, 64) == (1, 2, 4)
    assert tensors_to_try(SHAPE, HARDWARE, 7) == stages_to_try(SHAPE, 7) == (1,)
    assert stages_to_try(SHAPE, 64) == (1, 2, 4, 8)
    assert stages_to_try(replace(SHAPE, layers=6), 64) == (1, 2)


@pytest.mark.parametrize(
    ("lengths", "devices"),
    [([1000] * 512, 64), ([4000] * 256, 64), ([700, 1500, 300, 2000, 900, 100, 40, 1300] * 30, 8)],
)
def test_where_nothing_can_be_gained_nothing_is_claimed(lengths: list[int], devices: int) -> None:
    """All short, one length, eight devices: packs of whole sequences are as good, and that is said."""
    from lengthwise.report.simulation import closing_sentences

    question = replace(QUESTION, devices=devices, context_tokens=max(lengths), tensors=(1, 2), kinds=("none",))
    found = best_meshes(["static", "single-degree", "lengthwise"], [lengths, lengths[::-1]], question)
    said = closing_sentences(found, f"{devices} devices of h100")
    assert "no gain that can be told from none" in said
    assert "fewer GPU hours" not in said
