"""Blockwise attention: kernels that also give the log-sum-exp, the merge of partial results, and the planned ring."""

from lengthwise.attention.abilities import AttentionNeeds
from lengthwise.attention.choose import Faults, check_attention, choose_kernel
from lengthwise.attention.cuda_kernels import activate_flash
from lengthwise.attention.kernels import Block, BlockKernel, FlashCpuKernel, ReferenceKernel, Saved
from lengthwise.attention.packs import to_device
from lengthwise.attention.planned import PlannedAttention, planned_attention
from lengthwise.attention.recompute import ActivationPolicy, Recomputation

__all__ = [
    "ActivationPolicy",
    "AttentionNeeds",
    "Block",
    "BlockKernel",
    "Faults",
    "FlashCpuKernel",
    "PlannedAttention",
    "Recomputation",
    "ReferenceKernel",
    "Saved",
    "activate_flash",
    "check_attention",
    "choose_kernel",
    "planned_attention",
    "to_device",
]
