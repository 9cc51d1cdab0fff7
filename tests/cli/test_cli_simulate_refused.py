"""`lengthwise simulate`: what it refuses, and in which words."""

import pytest

from cli.simulate_calls import OWN, SMALL, simulate


def test_simulate_refuses_devices_that_no_mesh_has_room_on(tmp_path, capsys) -> None:
    rest = ("--lengths", "prolong", "--context", "4K", "--batch-tokens", "16K", "--batches", 1)
    asked = ("--model", "llama-70b", "--gpus", 2, *rest)
    status, said, _ = simulate(capsys, *asked)
    assert status == 0
    assert "no method here can hold these sequences" in said
    assert said.count("does not fit: no room beside") == 6
    status, _, error = simulate(capsys, *asked, "--details", "--out", tmp_path / "out")
    assert status == 2
    assert "Use more devices (--gpus, --pp)" in error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--lengths", "githup"], "Did you mean `github`"),
        ([], "one of RUN.yaml, --lengths and --data"),
        (["--lengths", "github", "--data", "x.jsonl"], "one of RUN.yaml, --lengths and --data"),
        (["--lengths", "github", "--planners", "static,static"], "each planner once"),
        (["--lengths", "github", "--gpus", "16"], "one of --ranks and --gpus"),
        (["--lengths", "github", "--ranks", 10**9], "--ranks: expected a whole number from 1 to 262144"),
        (["--lengths", "github", "--pp", "33"], "--pp: expected 1 to the 32 layers"),
        (["--lengths", "github", "--batches", 10**9], "--batches: expected a whole number from 1 to 10000"),
        (["--lengths", "github", "--batch-tokens", "8G", "--context", 1], "a batch of at most 4,194,304 sequences"),
        (["--lengths", "github", "--mode", "pipeline"], "--pp: expected a number in mode pipeline"),
        (["--lengths", "github", "--recompute", "auto"], "--recompute"),
        *(
            (["--lengths", "github", "--branches", wrong], "--branches: expected 2 or more completions x 17 or more")
            for wrong in ("8", "1x1K", "8x16", "8x0", "ax3")
        ),
        (["--lengths", "github", "--branches", "8x1K", "--context", "1K"], "more than the 1024 tokens of a prompt"),
        (["--lengths", "github", "--branches", "8x1K", "--details"], "--branches: expected nothing beside planners"),
        (["--lengths", "github", "--context", "2M", "--planners", "static", "--offload", "off"], "256 ranks"),
    ],
)
def test_simulate_refuses_what_it_cannot(tmp_path, capsys, arguments, told) -> None:
    status, _, error = simulate(capsys, *SMALL, *arguments, "--out", tmp_path / "out")
    assert status == 2
    assert told in error.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_simulate_refuses_an_output_that_takes_no_file_before_it_plans(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("lengthwise.simulator.best_mesh", lambda *_, **__: pytest.fail("planned"))
    (tmp_path / "file").write_text("")
    for out, told in (
        (tmp_path / "file/out", "a folder to write into"),
        ("/proc/x", "no permission to write into /proc"),
    ):
        status, _, error = simulate(capsys, *SMALL, "--lengths", "github", "--out", out)
        assert status == 2
        assert told in error.replace("\n", " ")


def test_simulate_tells_all_that_is_wrong_with_a_command_line_at_once(tmp_path, capsys) -> None:
    (tmp_path / "out").write_text("")
    status, _, error = simulate(
        capsys, "--model", "lama", "--data", tmp_path / "none.jsonl", "--empty", "maybe", "--gpus", 9, "--pp", 2,
        "--batch-tokens", "x", "--context", "y", "--capacity", "z", "--planners", "statik", "--batches", 0,
        "--trace-ranks", 0, "--hardware", "h1", "--mode", "fre", "--offload", "maybe", "--heads",
        "maybe", "--virtual", 0, "--out", tmp_path / "out",
    )  # fmt: skip
    assert status == 2
    for option in (
        "model", "data", "empty", "gpus", "batch-tokens", "context", "capacity", "planners", "batches", "trace-ranks",
        "hardware", "mode", "offload", "heads", "virtual",
    ):  # fmt: skip
        assert error.count(f"] --{option}:") == 1, option
    assert f"error[output] {tmp_path}/out" in error
    assert error.count("\n") == 16


def test_simulate_remedies_name_its_own_options(tmp_path, capsys) -> None:
    path = tmp_path / "lengths.json"
    path.write_text("[40000]")
    rest = (*OWN, "--lengths", path, "--out", tmp_path / "out")
    mesh = ("--context", "64K", "--planners", "static", "--offload", "off")
    _, _, static = simulate(capsys, *rest[:-3], "github", *rest[-2:], *mesh)
    assert "--context: expected at most 32768 tokens" in static
    assert "Use 8 ranks, raise --capacity to 16384, or take a shorter context." in static
    small = ("--model", "llama-7b", "--ranks", 4, "--capacity", "8K", "--batches", 1, "--out", tmp_path / "out")
    _, _, clipped = simulate(
        capsys, *small, "--lengths", "github", "--context", "1M", "--batch-tokens", "4M", "--planners", "lengthwise"
    )
    assert "or clip them with --context." in clipped
    _, _, waves = simulate(capsys, *rest, "--mode", "waves", "--planners", "lengthwise,static")
    assert "Give --planners lengthwise, or --mode free." in waves
    _, _, modes = simulate(capsys, *rest, "--mode", "fre")
    assert modes.count("--mode: expected one of free") == 1, "told once, not for each planner"
    _, _, ours = simulate(capsys, *rest, "--planners", "lengthwise", "--offload", "off")
    assert "raise --capacity to 10000, or leave such sequences out." in ours
    assert "capacity_tokens" not in static + ours
    assert "context_tokens" not in static + ours
