"""`lengthwise simulate`: what it refuses, and in which words."""

import pytest

from cli.simulate_calls import SMALL, simulate


def test_simulate_refuses_devices_that_no_mesh_has_room_on(tmp_path, capsys) -> None:
    rest = ("--lengths", "prolong", "--context", "4K", "--batch-tokens", "16K", "--batches", 1)
    asked = ("--model", "llama-70b", "--gpus", 2, *rest)
    status, said, _ = simulate(capsys, *asked)
    assert status == 0
    assert "no method here can hold these sequences" in said
    assert said.count("does not fit: no room beside") == 7
    status, _, error = simulate(capsys, *asked, "--details", "--out", tmp_path / "out")
    assert status == 2
    assert "Use more devices (--gpus, --pp)" in error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--lengths", "githup"], "Did you mean `github`"),
        (["--lengths", "github", "--data", "x.jsonl"], "one of RUN.yaml, --lengths and --data"),
        (["--lengths", "github", "--gpus", "16"], "one of --ranks and --gpus"),
        (["--lengths", "github", "--ranks", 10**9], "--ranks: expected a whole number from 1 to 262144"),
        (["--lengths", "github", "--pp", "33"], "--pp: expected 1 to the 32 layers"),
        (["--lengths", "github", "--batch-tokens", "8G", "--context", 1], "a batch of at most 4,194,304 sequences"),
        (["--lengths", "github", "--recompute", "auto"], "--capacity: expected nothing beside --recompute auto"),
        (["--lengths", "github", "--recompute", "all"], "--recompute: expected one of none, layer"),
        (["--lengths", "github", "--mode", "pipeline"], "--pp: expected a number in mode pipeline"),
        *(
            (["--lengths", "github", "--branches", wrong], "--branches: expected 2 or more completions x 17 or more")
            for wrong in ("8", "8x16")
        ),
        (["--lengths", "github", "--branches", "8x1K", "--context", "1K"], "more than the 1024 tokens of a prompt"),
        (["--lengths", "github", "--branches", "8x1K", "--details"], "--branches: expected nothing beside planners"),
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
