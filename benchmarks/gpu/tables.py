"""What the device itself does, what is right there, `lengthwise profile`.

- `ceilings`: copies, matrix products, and torch's own causal attention, forward and backward, by length and backend.
- `blocks`: seconds of one attention block by the kernels that `auto` chooses from by length, at the first call, which
  makes plans, and after; and a pack of a long document and many short ones, in one call, in two, and as the kernel runs
  it that `auto` chooses.
- `parity`: errors are relative, L2. A ring in bf16 is held to one call of the same kernel, both against plain matrix
  products in fp32 on the same rounded inputs: rounding of partial results may add a little, a wrong block adds a lot.
  The loss in chunks is held to the whole one, whose logits need 64-bit indices.
- `profile`: measurements, and the description that `--hardware` takes, into the folder.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from testing.attention_ranks import attend_on_ranks
from testing.oracles import relative_error
from testing.varlen import ReferenceDenseOps, ReferenceVarlenOps
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.loops import OurLoop
from gpu.rows import Records, middle, seconds_of
from gpu.setting import Sizes, model_config
from lengthwise.attention import AttentionNeeds, Block, BlockKernel, ReferenceKernel, Saved, choose_kernel
from lengthwise.attention.cuda_kernels import TorchVarlenOps
from lengthwise.attention.cudnn import ByLengthKernel, CudnnOps, DenseKernel
from lengthwise.attention.kernels import Gradients
from lengthwise.attention.packs import Pack, PackKernel, pack_documents
from lengthwise.attention.varlen import VarlenKernel
from lengthwise.cli import main
from lengthwise.comm import Mesh
from lengthwise.core.errors import MemoryShortage
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.cost import named_hardware
from lengthwise.cost.measured import read_measurements
from lengthwise.engine.batch import random_batch
from lengthwise.engine.step import StepContext, run_part

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


def blocks(sizes: Sizes, records: Records) -> None:
    """Write rows `block` and `pack`."""
    device = sizes.where

    def rows(tokens: int, number: int, head_dim: int) -> Tensor:
        return torch.randn(tokens, number, head_dim, dtype=sizes.dtype, device=device)

    def add(table: str, run: Callable[[], object], **values: Any) -> None:
        (first,) = seconds_of(run, device, repeats=1, warm_up=0)
        records.add(table, **values, **middle(seconds_of(run, device, repeats=sizes.repeats)), first_seconds=first)

    varlen = VarlenKernel(TorchVarlenOps() if device.type == "cuda" else ReferenceVarlenOps())
    dense = DenseKernel(CudnnOps() if device.type == "cuda" else ReferenceDenseOps())
    of_rings = [(tokens, tokens) for tokens in sizes.block_tokens] + list(sizes.uneven_blocks)
    shapes = [(tokens, tokens, True) for tokens in sizes.block_tokens] + [(*each, False) for each in of_rings]
    for heads, kv_heads, head_dim in sizes.block_heads:
        for queries, keys, causal in shapes:
            q, k, v = rows(queries, heads, head_dim), *(rows(keys, kv_heads, head_dim) for _ in range(2))
            block = Block(q=q, k=k, v=v, scale=head_dim**-0.5, causal=causal)
            sees = "before it" if causal else "all"
            for kernel in (varlen, dense):
                work = partial(_forward_backward, kernel.forward, kernel.backward, block)
                add("block", work, kernel=kernel.name, head_dim=head_dim, tokens=queries, keys=keys, sees=sees)
    heads, kv_heads, head_dim = sizes.block_heads[0]
    long, shorts = sizes.block_tokens[-1], [max(1, sizes.block_tokens[0] // 32)] * 500
    lengths, chosen = [long, *shorts], ByLengthKernel(dense, varlen, diagonal_tokens=long)  # on the CPU
    if device.type == "cuda":
        chosen = choose_kernel(
            device, AttentionNeeds(dtype=sizes.dtype, head_dim=head_dim, heads=heads, kv_heads=kv_heads)
        )
    q, k, v = (rows(sum(lengths), number, head_dim) for number in (heads, kv_heads, kv_heads))
    whole = Block(q=q, k=k, v=v, scale=head_dim**-0.5)
    apart = pack_documents(lengths, window=None, device=device, alone_from=long)
    borders = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    together = Pack(rows=slice(0, len(q)), cu_seqlens=borders, max_seqlen=long, window=None)
    ways = [(varlen, (together,)), (varlen, apart)]
    if isinstance(chosen, PackKernel):  # some GPUs have no kernel for packs
        ways.append((chosen, pack_documents(lengths, window=None, device=device, alone_from=chosen.alone_from)))
    for kernel, packs in ways:
        work = partial(_packs_forward_backward, kernel, whole, packs)
        add("pack", work, kernel=kernel.name, documents=len(lengths), tokens=len(q), longest=long, calls=len(packs))


def _forward_backward(
    forward: Callable[..., tuple[Tensor, Tensor]], backward: Callable[..., Gradients], block: Block
) -> None:
    out, lse = forward(block)
    backward(out, block, Saved(out=out, lse=lse))


def _packs_forward_backward(kernel: PackKernel, block: Block, packs: Sequence[Pack]) -> None:
    for pack in packs:
        forward, backward = partial(kernel.forward_pack, pack=pack), partial(kernel.backward_pack, pack=pack)
        _forward_backward(forward, backward, block.at(pack.rows))


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
    kernel = choose_kernel(device, AttentionNeeds(dtype=torch.bfloat16, head_dim=head_dim))
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
            context = StepContext(
                loop.model, Mesh(loop.transport, 1), loop.kernel, name="logits", logits_at_once=at_once
            )
            ran = run_part(plan, batch, context)
        except MemoryShortage as error:
            records.add("logits", logits_at_once=at_once, refused=error.got[:200])
            return False
        found.append((ran.loss_sum, loop.parameters.grads.clone()))
        loop.parameters.clear_gradients()
    (chunked, in_chunks), (whole, whole_gradient) = found
    errors = {"loss_error": chunked / whole - 1, "gradient_error": relative_error(in_chunks, whole_gradient)}
    passed = abs(errors["loss_error"]) <= 1e-4 and errors["gradient_error"] <= TOLERANCES[sizes.dtype]
    records.add("logits", tokens=tokens, logits=tokens * config.vocab_size, loss=whole, passed=passed, **errors)
    return passed


def profile(sizes: Sizes, records: Records) -> None:
    """Write rows `term` and `hardware` of each model, and its measurements.json and hardware.json.

    Raises:
        SystemExit, CalledProcessError: the command failed; its output is in the log.
    """
    for model in sizes.profile_models:
        _profile(sizes, records, model)


def _profile(sizes: Sizes, records: Records, name: str) -> None:
    config = model_config(name)
    about = {"model": name, "head_dim": config.head_dim}
    measurements, hardware = (
        records.folder / f"{name.split(',')[0]}-{config.head_dim}-{what}.json" for what in ("measurements", "hardware")
    )
    with tempfile.TemporaryDirectory(prefix="lengthwise-profile-") as folder:
        model = Path(folder) / "model"
        config.save_pretrained(model)
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
        records.add("term", **about, term=term, value=fitted.value, relative_error=fitted.relative_error)
    described = named_hardware(str(hardware))
    records.add(
        "hardware", name=found.place.device, **about, **{key: getattr(described, key) for key in _HARDWARE_KEYS}
    )
