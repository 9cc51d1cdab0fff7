"""What the device itself does, whole steps beside plain Hugging Face's, what is right there, `lengthwise profile`.

- `ceilings`: copies, matrix products, and torch's own causal attention, forward and backward, by length and backend.
- `steps`: tokens a second, MFU, memory beside the state. Loops are built one after the other and again in the opposite
  order, so that a drift of the clocks meets all alike. Nobody has fused kernels of Liger.
- `parity`: errors are relative, L2. A ring in bf16 is held to one call of the same kernel, both against plain matrix
  products in fp32 on the same rounded inputs: rounding of partial results may add a little, a wrong block adds a lot.
  The loss in chunks is held to the whole one, whose logits need 64-bit indices.
- `profile`: measurements, and the description that `--hardware` takes, into the folder.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from testing.attention_ranks import attend_on_ranks
from testing.oracles import relative_error
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.loops import OurLoop, PlainLoop
from gpu.rows import Records, clocks, middle, seconds_of
from gpu.setting import BatchKind, Sizes, hardware_here, model_config, peak_flops_per_second, plan_for, step_flops
from lengthwise.attention import Block, BlockKernel, ReferenceKernel, Saved, choose_kernel
from lengthwise.cli import main
from lengthwise.core.errors import MemoryShortage
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import named_hardware, shape_from_config
from lengthwise.cost.measured import base_cost, read_measurements
from lengthwise.engine.batch import random_batch
from lengthwise.engine.memory import PeakMemory
from lengthwise.engine.step import run_plan
from lengthwise.models import Computing

OURS, COMPILED, ONE_BY_ONE, PACKED = "lengthwise", "lengthwise, compiled", "HF one by one", "HF + varlen"
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
_RING_OVER_CALL, _RING_MORE = 2.0, 1e-3  # that a ring's error may be: so many times one call's, and a little more
_HARDWARE_KEYS = (
    *("peak_flops_per_second", "linear_efficiency", "attention_efficiency", "layer_launch_seconds"),
    *("copy_bytes_per_second", "device_bytes", "host_bytes"),
)


def ceilings(sizes: Sizes, records: Records) -> None:
    """Write rows `copy`, `matrix product` and `attention`."""
    device = sizes.where

    def add(table: str, run: Callable[[], object], rate: str, amount: float, **values: Any) -> None:
        took = middle(seconds_of(run, device, repeats=sizes.repeats, warm_up=2))
        records.add(table, **values, **{f"{rate}_per_second": amount / took["seconds"]}, **took)

    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    add("copy", lambda: target.copy_(source), "moved_bytes", 2 * sizes.copy_bytes)
    for size in sizes.product_sizes:
        a, b = (torch.randn(size, size, dtype=sizes.dtype, device=device) for _ in range(2))
        add("matrix product", lambda a=a, b=b: a @ b, "flops", 2 * size**3, size=size)
    heads, dim = sizes.attention_heads, 128
    for tokens, (name, backend) in ((tokens, each) for tokens in sizes.attention_tokens for each in BACKENDS.items()):
        q, k, v = (
            torch.randn(1, heads, tokens, dim, dtype=sizes.dtype, device=device, requires_grad=True) for _ in range(3)
        )

        def run(backend: SDPBackend = backend, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            out.backward(torch.ones_like(out))

        try:
            add("attention", run, "flops", 0.5 * 3.5 * 4 * tokens**2 * dim * heads, backend=name, tokens=tokens)
        except RuntimeError as error:  # this torch or this device has no such kernel
            records.add("attention", backend=name, tokens=tokens, refused=str(error).splitlines()[0][:200])


def steps(sizes: Sizes, records: Records) -> None:
    """Write rows `step` of lengthwise and of plain Hugging Face."""
    names = [OURS, *([COMPILED] if sizes.step_compiled else []), ONE_BY_ONE, PACKED]
    for model, batches in sizes.step_models.items():
        took: dict[tuple[str, str], list[float]] = {}
        for turn, loop in enumerate([*names, *reversed(names)]):
            for kind, row in _rows_of(sizes, model, loop, batches):
                took.setdefault((loop, kind.name), []).extend(row.pop("all_seconds", []))
                records.add("step, each turn", turn=turn, model=model, loop=loop, batch=kind.name, **row)
            _let_go(sizes)
        for kind in batches:
            _summary(sizes, records, model, kind, {loop: took.get((loop, kind.name), []) for loop in names})


def _let_go(sizes: Sizes) -> None:
    """Give back what a loop held, which nobody has any more."""
    gc.collect()
    if sizes.device == "cuda":
        torch.cuda.empty_cache()


def _summary(sizes: Sizes, records: Records, model: str, kind: BatchKind, took: Mapping[str, Sequence[float]]) -> None:
    """Write the medians of a batch over all turns."""
    config, lengths = model_config(model), kind.lengths()
    flops = step_flops(config, shape_from_config(config.to_dict()).total_params, lengths)
    for loop, found in ((loop, middle(seconds)) for loop, seconds in took.items() if seconds):
        records.add(
            "step", model=model, batch=kind.name, longest_tokens=max(lengths), recompute=kind.recompute, loop=loop,
            **found, tokens_per_second=sum(lengths) / found["seconds"],
            mfu=flops / found["seconds"] / peak_flops_per_second(sizes.where),
            times_lengthwise=found["seconds"] / statistics.median(took[OURS]) if took[OURS] else None,
        )  # fmt: skip


def _rows_of(
    sizes: Sizes, model: str, name: str, batches: Sequence[BatchKind]
) -> Iterator[tuple[BatchKind, dict[str, Any]]]:
    """Build a loop and run every batch; yield seconds, bytes and the loss of the first step, or why there are none."""
    if name in (OURS, COMPILED):
        computing = Computing(compile=name == COMPILED, fused_layers="off")
        loop = OurLoop(model, sizes.where, sizes.dtype, computing=computing)
    else:
        loop = PlainLoop(model, sizes.where, sizes.dtype, packed=name == PACKED, pack_tokens=sizes.pack_tokens)
    for kind in batches:
        try:
            row = _run_batch(sizes, loop, kind)
        except torch.OutOfMemoryError as error:
            row = {"refused": str(error).splitlines()[0][:200]}
        except MemoryShortage as error:
            row = {"refused": error.got[:200]}
        loop.parameters.clear_gradients()
        yield kind, row
        _let_go(sizes)


def _run_batch(sizes: Sizes, loop: OurLoop | PlainLoop, kind: BatchKind) -> dict[str, Any]:
    """Run a batch on one rank that holds its longest document, or a pack."""
    device, lengths, memory = sizes.where, kind.lengths(), PeakMemory()
    config: Any = loop.model.config
    cost = base_cost(shape_from_config(config.to_dict()), hardware_here(device), precision=sizes.precision)
    cluster = Cluster(ranks=1, capacity_tokens=max(sizes.pack_tokens, *lengths))
    plan = plan_for(lengths, cost, cluster, layers=config.num_hidden_layers, recompute=kind.recompute)
    batch = random_batch(lengths, vocab=config.vocab_size)
    on_gpu, first_loss = device.type == "cuda", loop.step(plan, batch)
    state = torch.cuda.memory_allocated(device) if on_gpu else 0
    memory.start()
    seconds = seconds_of(lambda: loop.step(plan, batch), device, repeats=sizes.step_repeats, warm_up=0)
    return {
        "all_seconds": seconds,
        "first_loss": first_loss,
        "state_bytes": state,
        "beside_state_bytes": memory.peak_bytes() - state,
        "num_alloc_retries": int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if on_gpu else 0,
        "clocks": clocks(),
        "said": "; ".join(loop.said),
    }


def parity(sizes: Sizes, records: Records) -> None:
    """Write rows `ring parity` and `logits`.

    Raises:
        SystemExit: an error is over its tolerance.
    """
    passed = {"ring": _ring(sizes, records), "loss in chunks": _logits(sizes, records)}
    if wrong := [name for name, right in passed.items() if not right]:
        raise SystemExit(f"parity: over the tolerance: {', '.join(wrong)}")


def _attend(kernel: BlockKernel, rows: Sequence[Tensor], scale: float) -> list[Tensor]:
    q, k, v, grad = rows
    block = Block(q=q, k=k, v=v, scale=scale)
    out, lse = kernel.forward(block)
    return [out, *kernel.backward(grad, block, Saved(out=out, lse=lse))]


def _errors(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> dict[str, float]:
    parts = zip(("out", "dq", "dk", "dv"), got, wanted, strict=True)
    return {f"{part}_error": relative_error(a.to(b.device), b) for part, a, b in parts}


def _one_piece(ranks: int, tokens: int, *, layers: int, capacity: int) -> Plan:
    microbatch = Microbatch(pieces=(Piece(ranks=tuple(range(ranks)), sequences=(0,)),))
    return Plan(ranks=ranks, layers=layers, capacity=capacity, tokens=(tokens,), microbatches=(microbatch,))


def _ring(sizes: Sizes, records: Records) -> bool:
    """Hold a ring of threads on the device to one call of the same kernel, both against fp32."""
    device, degree, tokens = sizes.where, sizes.ring_degree, sizes.ring_tokens
    heads, kv_heads, head_dim = sizes.ring_heads
    random, scale = torch.Generator().manual_seed(0), head_dim**-0.5
    drawn = (torch.randn(tokens, number, head_dim, generator=random) for number in (heads, kv_heads, kv_heads, heads))
    rows = [each.to(device, torch.bfloat16) for each in drawn]
    kernel = choose_kernel(device, dtype=torch.bfloat16, head_dim=head_dim)
    exact = _attend(ReferenceKernel(), [each.float() for each in rows], scale)
    alone = _errors(_attend(kernel, rows, scale), exact)
    plan = _one_piece(degree, tokens, layers=1, capacity=tokens + 1)
    (found,), _ = attend_on_ranks(plan, [rows], kernel, scale=scale, device=device)
    over = _errors(found, exact)
    passed = max(alone.values()) <= TOLERANCES[torch.bfloat16] and all(
        over[name] <= _RING_OVER_CALL * alone[name] + _RING_MORE for name in alone
    )
    of_ring = {f"ring_{name}": error for name, error in over.items()}
    records.add("ring parity", degree=degree, tokens=tokens, kernel=kernel.name, passed=passed, **alone, **of_ring)
    return passed


def _logits(sizes: Sizes, records: Records) -> bool:
    """Compare loss and gradients of whole logits and of chunks; of so many tokens that their number passes 2^31."""
    device, tokens = sizes.where, sizes.logits_tokens
    loop = OurLoop(sizes.logits_model, device, sizes.dtype)
    config: Any = loop.model.config
    plan = _one_piece(1, tokens, layers=config.num_hidden_layers, capacity=tokens)
    batch = random_batch((tokens,), vocab=config.vocab_size)
    found: list[tuple[float, Tensor]] = []
    for at_once in (sizes.logits_at_once, None):
        try:
            ran = run_plan(loop.model, plan, batch, loop.transport, loop.kernel, name="logits", logits_at_once=at_once)
        except MemoryShortage as error:
            records.add("logits", logits_at_once=at_once, refused=error.got[:200])
            return False
        found.append((ran.loss_sum, torch.cat([each.gradient for each in loop.parameters.shards()]).clone()))
        loop.parameters.clear_gradients()
    (chunked, in_chunks), (whole, whole_gradient) = found
    errors = {"loss_error": chunked / whole - 1, "gradient_error": relative_error(in_chunks, whole_gradient)}
    passed = abs(errors["loss_error"]) <= 1e-4 and errors["gradient_error"] <= TOLERANCES[sizes.dtype]
    records.add("logits", tokens=tokens, logits=tokens * config.vocab_size, loss=whole, passed=passed, **errors)
    return passed


def profile(sizes: Sizes, records: Records) -> None:
    """Write rows `term` and `hardware`, and the files measurements.json and hardware.json.

    Raises:
        SystemExit, CalledProcessError: the command failed; its output is in the log.
    """
    measurements, hardware = records.folder / "measurements.json", records.folder / "hardware.json"
    with tempfile.TemporaryDirectory(prefix="lengthwise-profile-") as name:
        model = Path(name) / "model"
        model_config(sizes.profile_model).save_pretrained(model)
        command = ["profile", "--model", str(model), "--ranks", "1"]
        command += ["--device", sizes.device, "--precision", sizes.precision, "--overwrite"]
        command += ["--seconds", str(sizes.profile_seconds), "--longest", str(sizes.profile_tokens)]
        command += ["--out", str(measurements), "--hardware-out", str(hardware)]
        if sizes.device == "cuda":  # a process that has started CUDA cannot fork ranks
            subprocess.run([sys.executable, "-m", "lengthwise", *command], check=True)
        else:
            try:
                main(command)
            except SystemExit as ended:
                if ended.code:
                    raise
    found = read_measurements(measurements)
    for term, fitted in found.fit.terms.items():
        records.add("term", term=term, value=fitted.value, relative_error=fitted.relative_error)
    described = named_hardware(str(hardware))
    records.add("hardware", name=found.place.device, **{key: getattr(described, key) for key in _HARDWARE_KEYS})
