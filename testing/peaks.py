"""The peak of a rank's tensors over a whole step, measured and predicted: states, microbatch and step end.

Every storage that an operation makes is counted until it is freed (`LiveBytes`), from the building of the model on. A
first step of a few tokens makes the optimizer's states; the peak is that of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig

from lengthwise.attention import choose_kernel
from lengthwise.attention.kernels import Block, Gradients, Saved
from lengthwise.attention.varlen import Documents, VarlenKernel
from lengthwise.comm import Lone, Mesh, SoloTransport, Transport
from lengthwise.config import LoraConfig, OptimizerConfig
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.cost import Choice, StepMemory, shape_from_config
from lengthwise.engine.byte_watch import LiveBytes
from lengthwise.engine.measuring import Layout, SmallPasses, measure_microbatch
from lengthwise.engine.offloading import Offloading
from lengthwise.engine.optimizer import sliced_optimizer
from lengthwise.engine.parameters import Parameters
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import DTYPES, ModelSource, build_adapted
from lengthwise.program.features import with_requires
from testing.laid import whole_parameters
from testing.ranks import run_ranks
from testing.sequences import make_batch
from testing.stores import CopyStore
from testing.varlen import ReferenceVarlenOps

LAYERS, VOCAB = 6, 4096
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 1 << 20,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
_EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
_WINDOWS = {"sliding_window": 256, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
_DELTA_RULE = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA = {
    "layer_types": ["linear_attention", "mlp", "linear_attention", "full_attention", "linear_attention", "mlp"],
    "mamba_num_heads": 16,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", _WINDOWS),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "gpt_oss": ("gpt_oss", {**_EXPERTS, **_WINDOWS, "intermediate_size": 192}),
    "llama, LoRA": ("llama", {}),
    "llama, wide": ("llama", {"head_dim": 64, "num_key_value_heads": 8, "intermediate_size": 128}),
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", _DELTA_RULE),  # scans in chunks of 64 rows
    "nemotron_h": ("nemotron_h", _MAMBA),  # of 128
    "lfm2": ("lfm2", {"layer_types": ["conv", "conv", "full_attention"] * 2}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one peak is of; `tokens` are those that a rank holds, in `documents` sequences of one length.

    prefix: if given, that many of them are a sequence that all documents continue, and attention takes packs, as on
    GPUs.
    """

    family: str = "llama"
    precision: str = "fp32"
    recompute: str = "none"
    offload: float = 0.0
    logits_at_once: int | None = 1 << 20
    degree: int = 1
    heads: int = 1
    tokens: int = 1024
    documents: int = 1
    prefix: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of its sequences, the prefix last."""
        documents = ((self.tokens * self.degree - self.prefix) // self.documents,) * self.documents
        return (*documents, self.prefix) if self.prefix else documents


def make_config(family: str) -> Any:
    """Return the config of one of `FAMILIES` or `HYBRIDS`."""
    kind, changes = (FAMILIES | HYBRIDS)[family]
    known = AutoConfig.for_model(kind)
    sizes = {key: value for key, value in {**_SIZES, **changes}.items() if hasattr(known, key)}
    return AutoConfig.for_model(kind, **sizes)


class _ClosedOps(ReferenceVarlenOps):
    """Calls of which `LiveBytes` sees the results alone, as a GPU's kernels have no tensors within."""

    def forward(self, block: Block, documents: Documents) -> tuple[Tensor, Tensor]:
        results = block.q.clone(), block.q.new_empty(*block.q.shape[1::-1], dtype=torch.float32)
        with _disable_current_modes():
            _fill(results, super().forward(block, documents))
        return results

    def backward(self, grad_out: Tensor, block: Block, saved: Saved, documents: Documents) -> Gradients:
        results = block.q.clone(), block.k.clone(), block.v.clone()
        with _disable_current_modes():
            _fill(results, super().backward(grad_out, block, saved, documents))
        return results


def _fill(results: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    for result, each in zip(results, found, strict=True):
        result.copy_(each)


class Rank:
    """One rank with model, flat parameters and optimizer, all of whose tensors are in `states`."""

    def __init__(self, cell: Cell, transport: Transport) -> None:
        source = ModelSource(name=cell.family, config=make_config(cell.family), weights=False)
        self.transport = transport
        on_cpu, packing = choose_kernel(torch.device("cpu")), VarlenKernel(_ClosedOps(), token_multiple=1)
        self.kernel = packing if cell.prefix else on_cpu
        self.model: Any = build_adapted(source, _lora(cell), seed=0)
        self.parameters = whole_parameters(self.model, transport, dtype=DTYPES[cell.precision])
        self.optimizer = sliced_optimizer(OptimizerConfig(), self.model, self.parameters, transport.rank)
        self.offloading = Offloading(self.model, self.kernel, CopyStore())

    def step(self, cell: Cell) -> None:
        """Run a step of one microbatch."""
        documents, prefix = tuple(range(cell.documents)), (cell.documents,) if cell.prefix else ()
        pieces = (Piece(ranks=tuple(range(cell.degree)), sequences=(*prefix, *documents), heads=cell.heads),)
        plan = with_requires(
            Plan(
                ranks=cell.degree,
                layers=LAYERS,
                capacity=sum(cell.lengths),
                tokens=cell.lengths,
                parents=(*prefix * cell.documents, None) if prefix else (),
                microbatches=(Microbatch(pieces=pieces, recompute=cell.recompute, offload=cell.offload),),
            )
        )
        context = StepContext(
            self.model,
            Mesh(self.transport, 1),
            self.kernel,
            name="step",
            logits_at_once=cell.logits_at_once,
            offloading=self.offloading,
        )
        rows = [cell.prefix + length for length in cell.lengths[: cell.documents]]
        run_part(plan, make_batch(rows, vocab=VOCAB).planned_by(plan), context)
        self.optimizer.end_step(1e-3, self.transport)


def measured_peak(cell: Cell) -> int:
    """Return the most bytes of tensors that a rank of a step has, the fullest of its ranks."""

    def work(transport: Transport) -> int:
        with LiveBytes() as live:
            rank = Rank(cell, transport)
            rank.step(replace(cell, tokens=64 * len(cell.lengths), prefix=min(cell.prefix, 64)))
            live.peak_bytes = live.now_bytes
            rank.step(cell)
        return live.peak_bytes

    return work(SoloTransport()) if cell.degree == 1 else max(run_ranks(work, cell.degree))


def predicted_at_start(cell: Cell, *, branches: bool = True) -> float:
    """Return the peak as the start of a run predicts it, from small passes of the model on one rank.

    branches: whether passes continue a prefix where the cell has one.
    """
    rank = Rank(replace(cell, degree=1), Lone(0, cell.degree))
    states = kept_bytes(rank.model, rank.parameters, OptimizerConfig())
    measured = []
    for position in {0, cell.degree - 1}:
        layout = Layout(degree=cell.degree, position=position, heads=cell.heads, branches=branches and cell.prefix > 0)
        passes = SmallPasses(model=rank.model, kernel=rank.kernel, recompute=cell.recompute, layout=layout)
        measured.append(measure_microbatch(passes, logits_at_once=cell.logits_at_once))
    peak = max(each.peak(cell.tokens, cell.offload) for each in measured)
    return states + max(rank.optimizer.pending_bytes()[1], peak)


def kept_bytes(model: nn.Module, parameters: Parameters, config: OptimizerConfig) -> int:
    """Count the bytes of a rank from step to step: of the model, its gradients and masters, and optimizer states.

    Where the optimizer is offloaded, without what is in the host's memory.
    """
    there = (*model.parameters(), *model.buffers(), *parameters.tensors())
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in there}
    return sum(storages.values()) + (-1 if config.offload else len(config.states)) * parameters.master_weights.nbytes


def predicted_by_formula(cell: Cell) -> float:
    """Return the peak by formulas from the model's shape."""
    source = ModelSource(name=cell.family, config=make_config(cell.family), weights=False)
    with torch.device("meta"):
        model = build_adapted(source, _lora(cell), seed=0)
    counts = [sum(each.numel() for each in model.parameters() if each.requires_grad >= least) for least in (0, 1)]
    return StepMemory(
        shape=shape_from_config(source.config.to_dict()),
        dtype_bytes=DTYPES[cell.precision].itemsize,
        parameters=counts[0],
        trained=None if counts[0] == counts[1] else counts[1],
        ranks=cell.degree,
        logits_at_once=cell.logits_at_once,
    ).peak_bytes(cell.tokens, Choice(recompute=cell.recompute, offload=cell.offload))


def _lora(cell: Cell) -> LoraConfig | None:
    return LoraConfig(r=8) if cell.family.endswith("LoRA") else None
