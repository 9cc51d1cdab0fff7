"""The parts of the engine that can be tried without training: schedule, batches, slices, metrics, the run's folder."""

import itertools
import json
import os
import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lengthwise.comm import SoloTransport, StrictWorld
from lengthwise.core.errors import OutputError
from lengthwise.core.plan import Microbatch, Piece
from lengthwise.data.dataset import DatasetBuilder
from lengthwise.engine.batch import StepBatch
from lengthwise.engine.replicated import FlatParameters
from lengthwise.program import Segment
from lengthwise.testing import make_batch, make_plan
from lengthwise.training.folder import RunFolder
from lengthwise.training.launch import StatusBoard, StopRequest
from lengthwise.training.metrics import step_metrics
from lengthwise.training.schedule import learning_rate
from lengthwise.training.verify import Verification

SCHEDULES = ("constant", "linear", "cosine")


@given(
    st.sampled_from(SCHEDULES), st.integers(1, 300), st.integers(0, 400), st.floats(1e-6, 10.0), st.data()
)  # fmt: skip
def test_learning_rate_warms_up_by_the_formula_and_never_passes_the_peak(schedule, num_steps, warmup, peak, data):
    step = data.draw(st.integers(1, num_steps))
    lr = learning_rate(step, peak=peak, schedule=schedule, warmup_steps=warmup, num_steps=num_steps)
    assert 0 < lr <= peak
    if schedule == "constant" or step <= warmup:
        assert lr == pytest.approx(peak * (min(1, step / warmup) if warmup else 1))


@given(st.sampled_from(SCHEDULES), st.integers(2, 300), st.integers(0, 50))
def test_learning_rate_never_rises_after_warm_up(schedule, num_steps, warmup):
    keys = {"peak": 1.0, "schedule": schedule, "warmup_steps": warmup, "num_steps": num_steps}
    lrs = [learning_rate(step, **keys) for step in range(1, num_steps + 1)]
    after = lrs[max(0, warmup - 1) :]
    assert after == sorted(after, reverse=True)
    if after:
        assert after[0] == pytest.approx(1)


def test_learning_rate_by_hand():
    keys = {"peak": 8.0, "warmup_steps": 0, "num_steps": 4}
    assert [learning_rate(step, schedule="linear", **keys) for step in range(1, 5)] == [8, 6, 4, 2]
    cosine = [learning_rate(step, schedule="cosine", **keys) for step in range(1, 5)]
    assert cosine == pytest.approx([8, 8 * (0.5 + 0.5**1.5), 4, 8 * (0.5 - 0.5**1.5)])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.data())
def test_batch_cuts_give_each_token_its_own_position_and_the_label_of_the_next(lengths, data):
    """However a sequence is cut, a shard's last token is asked for the first of the next; the very last for none."""
    batch = make_batch(lengths, vocab=50, seed=1, masked=0.3)
    segments = []
    for index, length in enumerate(lengths):
        cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=3))})
        segments += [Segment(sequence=index, start=a, stop=b) for a, b in itertools.pairwise(cuts)]
    shuffled = data.draw(st.permutations(segments))
    ids, positions, labels = batch.tensors(shuffled)
    whole = [batch.whole(index) for index in range(len(lengths))]
    expected = [(s.sequence, place) for s in shuffled for place in range(s.start, s.stop)]
    assert positions.tolist() == [place for _, place in expected]
    assert ids.tolist() == [whole[i][0][place].item() for i, place in expected]
    assert labels.tolist() == [whole[i][1][place].item() for i, place in expected]
    for index in range(len(lengths)):
        own = batch.dataset.labels(index).tolist()
        assert whole[index][1].tolist() == [*own[1:], -100]
    assert batch.loss_tokens == sum(int((labels != -100).sum()) for _, labels in whole)


def test_batch_of_a_rank_without_tokens_is_empty():
    batch = make_batch([5], vocab=9)
    assert [tensor.tolist() for tensor in batch.tensors([Segment(sequence=0, start=2, stop=2)])] == [[], [], []]


def test_batch_entry_i_is_sequence_ids_i():
    builder = DatasetBuilder()
    builder.start_source("data.0", "x", None)
    for tokens in ([1, 2, 3], [4], [5, 6]):
        builder.add(torch.tensor(tokens, dtype=torch.int32).numpy(), None)
    batch = StepBatch(builder.finish(), [2, 0])
    assert (batch.ids, batch.lengths, batch.loss_tokens) == ((2, 0), (2, 3), 3)
    assert batch.whole(0)[0].tolist() == [5, 6]
    assert batch.whole(1)[1].tolist() == [2, 3, -100]


class Rank(SoloTransport):
    """A rank of a larger world that nobody answers: enough to look at its slice."""

    def __init__(self, rank, world_size):
        super().__init__()
        self.rank, self.world_size = rank, world_size


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=6), st.integers(1, 12)
)  # fmt: skip
def test_flat_slices_cover_every_parameter_once_with_its_own_decay(shapes, world_size):
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    expected = [len(shape) >= 2 for shape in shapes for _ in range(torch.Size(shape).numel())]
    values = torch.cat([parameter.detach().flatten() for parameter in model])
    found, decays = [], []
    for rank in range(world_size):
        copy = nn.ParameterList([nn.Parameter(parameter.detach().clone()) for parameter in model])
        flat = FlatParameters(copy, Rank(rank, world_size), dtype=torch.float32)
        end = 0
        for start, stop, decayed in flat.shard_segments():
            assert (start, stop > start) == (end, True)
            found.append(flat.masters[start:stop])
            decays += [decayed] * (stop - start)
            end = stop
        assert all(torch.equal(a, b) for a, b in zip(copy, model, strict=True))
    assert torch.equal(torch.cat(found), values)
    assert decays == expected


def test_flat_keeps_fp32_masters_of_a_bf16_model_and_adds_gradients_in_fp32():
    model = nn.Linear(3, 1, bias=False)
    model.weight.data.copy_(torch.tensor([[1.0009765625, 2.0, 3.0]]))  # 1 + 2^-10, which bf16 does not have
    flat = FlatParameters(model, SoloTransport(), dtype=torch.bfloat16)
    assert (model.weight.dtype, flat.masters.dtype, flat.grads.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert flat.masters[0] == 1.0009765625
    assert model.weight[0, 0] == 1
    for value in (256.0, 1.0, 1.0):  # in bf16, 256 + 1 + 1 stays 256
        model(torch.tensor([[value, 0, 0]], dtype=torch.bfloat16)).sum().backward()
    assert flat.reduce_gradients()[0] == 258
    assert model.weight.grad is None


def test_step_metrics_by_hand():
    plan = make_plan(
        3,
        [10, 20, 30],
        [Piece(ranks=(0, 1), sequences=(2,)), Piece(ranks=(2,), sequences=(0,)), Piece(ranks=(0,), sequences=(1,))],
    )
    found = step_metrics(
        plan, step=4, loss=2.0, grad_norm=0.5, lr=0.1, num_loss_tokens=57, busy_seconds=[4.0, 1.0, 1.0],
        step_seconds=8.0, plan_seconds=0.25,
    )  # fmt: skip
    assert (found.num_sequences, found.num_tokens, found.num_loss_tokens, found.num_microbatches) == (3, 60, 57, 3)
    assert (found.imbalance_ratio, found.idle_ratio, found.ring_token_ratio) == (2, 0.75, 0.5)
    assert found.tokens_per_second == 7.5


def test_run_folder_refuses_a_file_and_a_run_and_names_them(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="a file"):
        RunFolder(tmp_path / "file").check_free(overwrite=True)
    for name in ("metrics.jsonl", "config.yaml"):
        (tmp_path / name).write_text("")
    with pytest.raises(OutputError, match=r"config\.yaml, metrics\.jsonl"):
        RunFolder(tmp_path).check_free(overwrite=False)
    RunFolder(tmp_path).check_free(overwrite=True)
    RunFolder(tmp_path / "fresh").check_free(overwrite=False)


def test_run_folder_refuses_to_overwrite_an_input(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "model")
    for name in ("model", "model/tokenizer", "link"):
        with pytest.raises(OutputError, match="input"):
            RunFolder(tmp_path).check_free(overwrite=True, inputs=[tmp_path / name])
    RunFolder(tmp_path).check_free(overwrite=True, inputs=[tmp_path / "model2", tmp_path])


def test_status_board_keeps_the_last_phase_of_each_rank():
    board = StatusBoard(2)
    board.note(1, "step 1, a very long phase " + "x" * 500)
    board.note(1, "short")
    assert (board.last_seen(0), board.last_seen(1)) == ("start", "short")
    board.note(0, "ä" * 300)
    assert board.last_seen(0).startswith("ää")
    assert board.last_seen(1) == "short"


def test_stop_request_is_known_to_one_that_listens_later():
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell runs the tests in the background
    with StopRequest().listening() as first:
        os.kill(os.getpid(), signal.SIGTERM)
        assert first.signal == signal.SIGTERM
        with StopRequest().listening() as second:
            assert second.signal == signal.SIGTERM
            os.kill(os.getpid(), signal.SIGINT)
        assert (second.signal, first.times) == (signal.SIGTERM, 1)
    assert signal.getsignal(signal.SIGINT) is before


def test_stop_request_ends_a_process_of_its_own_at_the_second():
    with StopRequest(ends_at_the_second=True).listening() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.times == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2e-12])
@pytest.mark.parametrize("place", ["gradient", "loss", "reference_loss", "router_loss", "reference_router_loss"])
def test_verification_fails_at_nan_infinity_and_what_is_over_the_tolerance(place, bad):
    keys = {
        "plan": make_plan(1, [2], [Microbatch(pieces=(Piece(ranks=(0,), sequences=(0,)),)).pieces[0]]),
        "gradients": {"a": 1e-13, "b": 0.0, "c": 1e-13},
        "tolerance": 1e-12,
        **dict.fromkeys(("loss", "reference_loss", "router_loss", "reference_router_loss"), 1.0),
    }
    assert Verification(**keys).passed
    changed = {"gradients": {**keys["gradients"], "b": bad}} if place == "gradient" else {place: 1.0 + bad}
    assert not Verification(**{**keys, **changed}).passed


def test_run_folder_line_is_json_that_any_reader_takes(tmp_path):
    """No NaN and no Infinity in a line: JSON has neither."""
    folder = RunFolder(tmp_path)
    folder.write_eval({"step": 1, "loss": 1.5})
    assert json.loads((tmp_path / "eval.jsonl").read_text()) == {"step": 1, "loss": 1.5}


def test_flat_parameters_start_from_those_of_rank_0():
    """Whatever each rank loaded or drew, all train the same model."""

    def work(transport):
        layer = torch.nn.Linear(3, 2)
        with torch.no_grad():
            layer.weight.fill_(float(transport.rank))
            layer.bias.fill_(10.0 + transport.rank)
        flat = FlatParameters(layer, transport, dtype=torch.float32)
        return flat.values.tolist(), flat.masters.tolist()

    results = StrictWorld(3).run(work)
    assert all(values == results[0][0] for values, _ in results)
    assert results[0][0][:8] == [0.0] * 6 + [10.0] * 2
    assert [value for _, masters in results for value in masters] == results[0][0]
