"""What the other tables of a GPU decide: searches, draws, kinds of kernels, and that a wrong kernel is a failure."""

import json
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu import parity, place
from gpu.costs import draw_packs
from gpu.longest import search
from gpu.loops import OurLoop
from gpu.peaks import PredictedBytes, peak_beside
from gpu.records import Records, read_rows
from gpu.runs import train_run, write_inputs
from gpu.shares import kind_of
from gpu.sizes import FULL, sizes_of
from gpu.switches import EXPERTS, SWITCHES
from lengthwise.attention import ReferenceKernel
from lengthwise.cost import LOGITS_AT_ONCE
from lengthwise.engine.batch import random_batch
from lengthwise.models import Computing
from lengthwise.profiler.runs import local_run

TINY = sizes_of("cpu", tiny=True)


@given(true=st.integers(0, 5000), guess=st.integers(0, 6000), most=st.integers(1, 5000))
def test_a_search_ends_at_what_fits(true, guess, most):
    asked = []

    def fits(tokens):
        asked.append(tokens)
        return tokens <= true

    found, runs = search(fits, guess, most, runs=200)
    assert runs == len(asked) == len(set(asked))
    assert found == min(true, most)
    assert all(1 <= tokens <= most for tokens in asked)


@given(true=st.integers(1000, 5000), off=st.floats(0.9, 1.1))
def test_a_search_near_its_guess_is_short(true, off):
    found, runs = search(lambda tokens: tokens <= true, round(true * off), 100_000, runs=5)
    assert runs <= 5
    assert 0.93 * true <= found <= true


@given(number=st.integers(1, 30), seed=st.integers(0, 5))
def test_packs_to_fit_and_to_predict_are_all_different(number, seed):
    packs = draw_packs(number, (8, 4000), seed)
    assert len(set(packs)) == number
    assert all(8 <= sum(pack) <= 4000 for pack in packs)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matrix products"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<... FusedAdamMathFunctor>", "optimizer"),
        ("void (anonymous namespace)::cunn_SoftMaxForward<8, float>", "softmax and loss"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, silu_kernel>", "elementwise and norms"),
        ("something of nobody", "others"),
    ],
)
def test_kernels_are_told_apart_by_their_names(name, kind):
    assert kind_of(name) == kind


def test_every_key_of_speed_has_a_line_of_its_own():
    changed = {key for _, changes in (*SWITCHES, *EXPERTS) for key in changes}
    assert {field.name for field in fields(Computing)} | {"loss", "recompute", "optimizer"} <= changed


class WrongKernel(ReferenceKernel):
    """Forgets a hundredth of the values' gradient."""

    def backward(self, grad_out, block, saved):
        dq, dk, dv = super().backward(grad_out, block, saved)
        return dq, dk, dv * 0.99


class BrokenKernel(ReferenceKernel):
    """Ends with an error of its own."""

    def forward(self, block):
        if block.q.dtype == torch.bfloat16:
            raise RuntimeError("CUDA error: an illegal memory access")
        return super().forward(block)


def test_a_broken_kernel_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "choose_kernel", lambda *_, **__: BrokenKernel())
    monkeypatch.setattr(parity, "_ring", lambda *_: True)
    with pytest.raises(SystemExit, match=r"auto torch\.bfloat16"):
        parity.parity(TINY, Records(tmp_path, "parity"))
    rows = [row for row in read_rows(tmp_path) if row["table"] == "kernel parity"]
    assert {row["dtype"]: row["passed"] for row in rows} == {"bfloat16": False, "float32": True}


def test_a_wrong_kernel_fails_the_parity_part(tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "choose_kernel", lambda *_, **__: WrongKernel())
    with pytest.raises(SystemExit, match=r"reference torch\.float32"):
        parity.parity(TINY, Records(tmp_path, "parity"))
    rows = read_rows(tmp_path)
    assert {row["passed"] for row in rows if row["table"] == "kernel parity" and row["dtype"] == "float32"} == {False}
    assert any(row["table"] == "logits" and row["passed"] for row in rows)


@pytest.mark.parametrize(
    ("line", "status", "found"),
    [
        ("1980 MHz, 1980 MHz, 3201 MHz, 120.5 W, 700.00 W, 31, 580.65", 0, "1980 MHz"),
        ("", 9, None),
        ("no devices were found", 0, None),
    ],
)
def test_clocks_are_read_where_there_is_a_driver(monkeypatch, line, status, found):
    monkeypatch.setattr(place.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    done = SimpleNamespace(returncode=status, stdout=line)
    monkeypatch.setattr(place.subprocess, "run", lambda *_, **__: done)
    assert place.clocks().get("clocks.sm") == found


def test_sizes_on_a_gpu_name_its_number():
    assert sizes_of("cuda", tiny=False).where == torch.device("cuda", 0)
    assert TINY.where == torch.device("cpu")


def test_logits_of_the_table_are_over_2_to_the_31():
    from gpu.models import model_config

    assert FULL.logits_tokens * model_config(FULL.logits_model).vocab_size > 2**31


def test_bytes_are_predicted_and_measured_of_the_same_thing():
    loop = OurLoop("tiny", torch.device("cpu"), torch.float32)
    plan, batch = local_run((300,), 1, 2).plan, random_batch((300,), vocab=256)
    measured = peak_beside(loop, lambda: loop.work(plan, batch))
    predicted = PredictedBytes(loop, logits_at_once=LOGITS_AT_ONCE, most_tokens=1000)
    assert predicted.at_start(300) == pytest.approx(measured, rel=0.01)
    assert predicted.by_formula(300) == pytest.approx(measured, rel=0.05)


def test_a_run_that_is_refused_says_why(tmp_path):
    write_inputs(tmp_path, "tiny", [[20, 9], [20, 9]])
    assert [len(json.loads(line)["input_ids"]) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == [
        20,
        9,
        20,
        9,
    ]
    settings = {"global_batch": {"sequences": 2}, "steps": 2, "capacity_tokens": 32}
    ran = train_run(TINY, tmp_path, "right", settings, ranks=1)
    assert len(ran.losses) == 2
    assert ran.tokens_per_second > 0
    refused = train_run(TINY, tmp_path, "wrong", {**settings, "attention": "flash2"}, ranks=1)
    assert "attention: expected auto or reference on the CPU" in refused.refused
