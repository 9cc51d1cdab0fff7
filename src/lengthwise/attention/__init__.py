"""Layers that mix tokens, by a plan: blockwise attention and its ring, scans with states, short convolutions."""

from lengthwise.attention.abilities import AttentionNeeds
from lengthwise.attention.choose import Faults, check_attention, choose_kernel
from lengthwise.attention.cuda_kernels import activate_flash
from lengthwise.attention.halos import convolve_spans
from lengthwise.attention.kernels import Block, BlockKernel, FlashCpuKernel, ReferenceKernel, Saved
from lengthwise.attention.packs import to_device
from lengthwise.attention.planned import PlannedAttention, planned_attention
from lengthwise.attention.proof import differences, tolerance_for
from lengthwise.attention.recompute import ActivationPolicy, Recomputation
from lengthwise.attention.states import Opened, scan_spans

__all__ = [
    "ActivationPolicy",
    "AttentionNeeds",
    "Block",
    "BlockKernel",
    "Faults",
    "FlashCpuKernel",
    "Opened",
    "PlannedAttention",
    "Recomputation",
    "ReferenceKernel",
    "Saved",
    "activate_flash",
    "check_attention",
    "choose_kernel",
    "convolve_spans",
    "differences",
    "planned_attention",
    "scan_spans",
    "to_device",
    "tolerance_for",
]
