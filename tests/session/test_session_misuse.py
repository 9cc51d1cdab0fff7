"""What a loop does with a model while a session has it: gradients, conversions and copies."""

import copy
import io
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from loops import SGD, in_ranks, said
from testing.small import rows_of, small_model

from lengthwise import Session

ROWS = rows_of([20, 30], 1)


def test_gradients_are_none_once_they_are_cleared_as_in_a_plain_loop():
    model = small_model(torch.float32)
    optimizer, weight = SGD(model.parameters()), model.lm_head.weight
    with Session(model, optimizer, capacity_tokens=128) as session:
        for clear in (optimizer.zero_grad, model.zero_grad):
            norm = session.backward(ROWS).grad_norm
            assert "clip_grad_norm_" in said(lambda: weight.grad.norm())
            clear()
            assert all(each.grad is None for each in model.parameters())
            assert session.backward(ROWS).grad_norm == norm, "nothing of the one before"
            clear()
    assert weight.grad is None


def test_conversions_and_pickles_are_refused_before_anything_changes():
    model = small_model(torch.float32)
    with Session(model, SGD(model.parameters()), capacity_tokens=128) as session:
        session.backward(ROWS)
        half, head = said(lambda: model.half()), said(lambda: model.lm_head.to(torch.float64))
        assert "conversion to torch.float16 on cpu. Convert and move a model before its session" in half
        assert "Linear: expected torch.float32 on cpu" in head
        assert "session.save_pretrained" in said(lambda: torch.save(model, io.BytesIO()))
        assert model.to("cpu").to(torch.float32) is model, "nothing to change"
        assert {each.dtype for each in model.parameters()} == {torch.float32}
        session.optimizer.step()
        session.backward(ROWS)
    assert said(lambda: torch.save(model, io.BytesIO())) == ""
    assert model.half().lm_head.weight.dtype == torch.float16


def test_a_second_session_over_the_same_model_trains_it_and_so_does_a_plain_loop_after_it():
    """In bf16, where hooks of the first one would take the gradients; whether or not the first was closed."""
    model, norms = small_model(torch.bfloat16), []
    for closes in (True, False, False):
        session = Session(model, SGD(model.parameters()), capacity_tokens=128)
        norms.append(session.backward(ROWS).grad_norm)
        model.zero_grad()
        norms.append(session.backward(ROWS).grad_norm)
        if closes:
            session.close()
    assert norms == norms[:1] * 6
    session.close()
    model(torch.zeros(1, 3, dtype=torch.long)).logits.sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0
    assert "Make a new optimizer" in said(session.optimizer.step)


def test_a_copy_that_was_made_in_a_session_trains_in_another():
    model = small_model(torch.bfloat16)
    with Session(model, SGD(model.parameters()), capacity_tokens=128) as first:
        copied = copy.deepcopy(model)
        with Session(copied, SGD(copied.parameters()), capacity_tokens=128) as second:
            norms = []
            for _ in range(2):
                norms.append(second.backward(ROWS).grad_norm)
                copied.zero_grad()
            assert norms[0] == norms[1] == first.backward(ROWS).grad_norm
            assert "conversion" in said(lambda: copied.half())
    torch.save(copied, file := io.BytesIO())
    file.seek(0)
    assert torch.load(file, weights_only=False).half().lm_head.weight.dtype == torch.float16


def test_a_model_with_a_value_that_is_not_finite_is_refused_by_its_name_on_all_ranks(tmp_path):
    def work(_rank):
        model = small_model(torch.float32)
        model.model.layers[1].mlp.up_proj.weight.data[3, 3] = float("nan")
        for layout in ({"shard": "zero1"}, {"stages": 2}):
            told = said(partial(Session, model, SGD(model.parameters()), capacity_tokens=64, **layout))
            assert "NaN or infinity in model.layers.1.mlp.up_proj.weight." in told

    in_ranks(work, 2, tmp_path)


def test_a_block_and_a_mode_in_which_nothing_trains_are_named():
    model = small_model(torch.float32)
    with Session(model, SGD(model.parameters()), capacity_tokens=128, recompute="layer") as session:
        for block, wanted in (
            (torch.no_grad, "backward: expected enabled gradients; got torch.no_grad"),
            (torch.inference_mode, "backward: expected enabled gradients; got torch.inference_mode"),
            (partial(torch.autocast, "cpu", torch.float16), "backward: expected no torch.autocast, or one to bfloat16"),
        ):
            with block():
                assert wanted in said(lambda: session.backward(ROWS))
                session.evaluate(ROWS)
        model.eval()
        assert "expected a model in training mode, for recomputation" in said(lambda: session.backward(ROWS))
        model.train()
        assert said(lambda: session.backward(ROWS)) == ""


ODD_ROWS = [
    (None, "sequences: expected a list of rows"),
    ("abc", "sequences: expected a list of rows"),
    (({} for _ in range(2)), "sequences: expected a list of rows"),
    ([{"input_ids": [1, 2], 7: [1, 2]}], "names of columns that are text"),
    ([torch.tensor([1, 2]).to_sparse()], "sequence 0, input_ids: expected one number per token"),
    ([{"input_ids": [1], "x": torch.ones(1, n)} for n in (2, 3)], "sequence 1, x: expected (2,) a token"),
    ([[1, 2], {"ids": [1]}], "sequence 1: expected a column input_ids"),
    ([[1, 2], {"input_ids": []}], "sequence 1: expected at least one token"),
    ([{"input_ids": [1.5]}], "whole numbers"),
    ([{"input_ids": [1, -3]}], "numbers from 0"),
    ([{"input_ids": [1, 10**6]}], "input_ids: expected ids below the model's 64; got 1000000"),
    ([{"input_ids": [1, 2], "labels": [-100, 10**6]}], "labels: expected ids below the model's"),
    ([{"input_ids": [1, 2], "labels": [1]}], "one value per token, 2"),
    ([{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}], "one run of tokens"),
    ([{"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}], "one sequence per row"),
    ([{"input_ids": "abc"}], "one number per token"),
    ({"input_ids": torch.ones(2, 5).long()}, "collate_fn=list"),
]
ODD_ARGUMENTS = [
    ("loss", "sum", "loss: expected a function of outputs and tokens, or None; got 'sum'"),
    ("loss", lambda outputs: 1, "loss: expected a function of outputs and tokens"),
    ("compute_loss", 5, "compute_loss: expected a function of model and inputs"),
    ("normalizer", "x", "normalizer: expected a finite normalizer above 0; got 'x'"),
    ("loss", lambda *_: None, "loss: expected a tensor of one number, computed from the model's outputs; got None"),
    ("loss", lambda *_: 1.0, "loss: expected a tensor of one number"),
    ("loss", lambda *_: torch.tensor(1), "loss: expected a tensor of one number"),
    ("loss", lambda outputs, _: outputs.logits.sum().detach(), "which does not depend on the model's outputs"),
    ("loss", lambda outputs, _: outputs.logits.sum(-1), "loss: expected a tensor of one number"),
]
TAU = torch.nn.Parameter(torch.tensor(1.3))  # a temperature that is learned beside the model
ODD_COMBINES = [
    ({"combine": 5}, "combine: expected a function of the values"),
    ({"combine": lambda values: 1.0}, "combine: expected a tensor of one number, computed from the values"),
    ({"combine": lambda values: values.sum(), "per": "word"}, "per: expected sequence or token"),
    ({"combine": lambda values: values.sum(), "values": lambda *_: None}, "values: expected one value per token"),
    ({"combine": lambda values: (values * TAU).sum()}, "alone; got one of a parameter () beside the model as well"),
    ({"combine": lambda _: TAU * 2}, "combine: expected a loss of the gathered values alone"),
]


def test_odd_rows_arguments_and_losses_are_named_and_the_next_step_is_right():
    model = small_model(torch.float32)
    with Session(model, SGD(model.parameters()), capacity_tokens=128) as session:
        assert session.clip_grad_norm_(1.0) == 0, "as torch's, of no gradients"
        expected = session.backward(ROWS).loss
        for rows, wanted in ODD_ROWS:
            assert wanted in said(partial(session.backward, rows))
        for name, value, wanted in ODD_ARGUMENTS:
            assert wanted in said(partial(session.backward, ROWS, **{name: value}))
        for given, wanted in ODD_COMBINES:
            assert wanted in said(partial(session.backward_by_sequence, ROWS, **given))
        decay = {"combine": lambda values: values.sum() + sum(each.square().sum() for each in model.parameters())}
        told = said(partial(session.backward_by_sequence, ROWS, **decay))
        assert "of the model and 20 more tensors as well" in told
        assert "limit: expected a number of 0 or more" in said(lambda: session.clip_grad_norm_(-1.0))
        assert "numbers: expected a dense tensor" in said(lambda: session.sum_over_ranks([1.0]))
        assert "batches: expected an iterable" in said(lambda: list(session.batches(5)))
        padded = {name: F.pad(each, (2, 1), value=0) for name, each in ROWS[0].items()}
        padded["attention_mask"] = F.pad(torch.ones_like(ROWS[0]["input_ids"]), (2, 1))
        assert session.evaluate([padded]).loss == session.evaluate(ROWS[:1]).loss, "without padding"
        # As a tokenizer returns one text, in NumPy's short integers.
        narrow = [{name: values.numpy().astype("uint16")[None] for name, values in row.items()} for row in ROWS[-1:]]
        assert session.evaluate(narrow).loss == session.evaluate(ROWS[-1:]).loss
        session.optimizer.zero_grad()
        assert session.backward(ROWS).loss == expected


def scaled(output, tokens, reduction="sum"):
    logits = output.logits[0] * TAU
    return F.cross_entropy(logits, tokens.shift_labels, ignore_index=-100, reduction=reduction)


def scaled_share(model, inputs):
    return model(**inputs, num_items_in_batch=40).loss * TAU


BY_SEQUENCE = {"combine": lambda sums: sums.square().mean(), "values": partial(scaled, reduction="none")}
OF_OTHERS = [
    lambda session, rows: session.backward(rows, loss=scaled),
    lambda session, rows: session.backward(rows, compute_loss=scaled_share),
    lambda session, rows: session.backward_by_sequence(rows, **BY_SEQUENCE),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_loss_trains_beside_the_model_is_refused_on_several_ranks(ranks, tmp_path):
    """Also on ranks without a token."""

    def work(_rank):
        model = small_model(torch.float32)
        with Session(model, SGD(model.parameters()), capacity_tokens=128, shard="zero1") as session:
            found = []
            for run in OF_OTHERS:
                TAU.grad = None
                message = said(partial(run, session, ROWS[-1:]))
                found.append((message, None if TAU.grad is None else TAU.grad.item()))
        return found

    found = in_ranks(work, ranks, tmp_path)
    for lines in zip(*found, strict=True):
        if ranks == 1:
            assert lines[0][0] == ""
            assert lines[0][1] not in (None, 0.0), "as in a plain loop"
        else:
            told = sorted(line.split("; got ")[1].split(". ")[0] for line, _ in lines)
            assert told == ["a parameter () beside the model", "others, on another rank"]


def test_a_teacher_in_a_loss_is_refused_and_its_values_in_a_column_are_exact():
    model, teacher = small_model(), small_model().requires_grad_(False)
    teacher.lm_head.weight.mul_(3.0)

    def apart(ours, theirs):
        return F.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="sum")

    def by_token(output, tokens):
        theirs = teacher(input_ids=tokens.input_ids[None], position_ids=tokens.position_ids[None]).logits
        return apart(output.logits, theirs)

    def of_model(model, inputs):
        return apart(model(**inputs).logits, teacher(**inputs).logits) / 50

    whole = [row["input_ids"][None] for row in ROWS]
    with torch.no_grad():
        expected = sum(apart(model(input_ids=ids).logits, teacher(input_ids=ids).logits).item() for ids in whole)
    with (
        Session(model, SGD(model.parameters()), capacity_tokens=128) as session,
        Session(teacher, capacity_tokens=128) as of_teacher,
    ):
        for given in ({"loss": by_token}, {"compute_loss": of_model}):
            text = said(lambda given=given: session.evaluate(ROWS, **given))
            assert "a run of LlamaForCausalLM, another model" in text
            assert "token_values of a Session(teacher)" in text
        found = of_teacher.token_values(ROWS, lambda outputs, _: outputs.logits[0])
        rows = [{**row, "teacher": each} for row, each in zip(ROWS, found, strict=True)]
        own = lambda output, tokens: apart(output.logits[0], tokens.columns["teacher"])  # noqa: E731
        assert session.backward(rows, loss=own, normalizer=1.0).loss == pytest.approx(expected, rel=1e-9)


def smoothed(logits, labels, vocab_size, num_items_in_batch=None, **_):
    words, labels = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    total = F.cross_entropy(words, labels, reduction="sum", label_smoothing=0.3)
    return total / num_items_in_batch


def test_the_models_own_loss_is_the_sessions_and_a_mean_of_it_is_refused():
    model = small_model()
    model.loss_function = smoothed
    plain, total = copy.deepcopy(model), sum(int((row["labels"][1:] != -100).sum()) for row in ROWS)
    for row in ROWS:
        ids, labels = row["input_ids"][None], row["labels"][None]
        plain(input_ids=ids, labels=labels, num_items_in_batch=total).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
    with Session(model, SGD(model.parameters()), capacity_tokens=128) as session:
        result = session.backward(ROWS)
        assert result.grad_norm == pytest.approx(expected, rel=1e-9)
        weighed = [{**row, "weights": torch.ones(len(row["input_ids"]))} for row in ROWS]
        assert "loss of the model: expected rows without weights" in said(lambda: session.backward(weighed))
        model.loss_function = lambda **given: smoothed(**{**given, "num_items_in_batch": given["labels"].numel()})
        assert "loss of the model: expected a microbatch's share" in said(lambda: session.evaluate(ROWS))
        model.loss_function = lambda logits, labels, vocab_size: logits.sum()
        assert "expected a loss_function that takes num_items_in_batch" in said(lambda: session.evaluate(ROWS))
        model.loss_function = lambda logits, labels, vocab_size, num_items_in_batch: smoothed(
            logits, labels, vocab_size, num_items_in_batch
        )
        assert session.evaluate(ROWS).loss == pytest.approx(result.loss, rel=1e-9)
