"""Blockwise attention: kernels that also give the log-sum-exp, the merge of partial results, and the planned ring."""

from lengthwise.attention.choose import choose_kernel
from lengthwise.attention.kernels import Block, BlockKernel, FlashCpuKernel, ReferenceKernel, Saved
from lengthwise.attention.planned import PlannedAttention, planned_attention
from lengthwise.attention.recompute import ActivationPolicy, Recomputation

__all__ = [
    "ActivationPolicy",
    "Block",
    "BlockKernel",
    "FlashCpuKernel",
    "PlannedAttention",
    "Recomputation",
    "ReferenceKernel",
    "Saved",
    "choose_kernel",
    "planned_attention",
]
