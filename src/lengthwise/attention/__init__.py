"""Layers that mix tokens, by a plan: blockwise attention and its ring, scans with states, short convolutions."""

from lengthwise.attention.abilities import AttentionNeeds
from lengthwise.attention.choose import check_attention, choose_kernel
from lengthwise.attention.cuda_kernels import activate_flash
from lengthwise.attention.halos import convolve_spans
from lengthwise.attention.kernels import Block, BlockKernel, FlashCpuKernel, ReferenceKernel, Saved
from lengthwise.attention.packs import to_device
from lengthwise.attention.planned import PlannedAttention, planned_attention
from lengthwise.attention.proof import Case, Proof, by_autograd, faults_of_ranks, prove
from lengthwise.attention.recompute import ActivationPolicy, Recomputation, keeps_products
from lengthwise.attention.states import Opened, scan_spans

__all__ = [
    "ActivationPolicy",
    "AttentionNeeds",
    "Block",
    "BlockKernel",
    "Case",
    "FlashCpuKernel",
    "Opened",
    "PlannedAttention",
    "Proof",
    "Recomputation",
    "ReferenceKernel",
    "Saved",
    "activate_flash",
    "by_autograd",
    "check_attention",
    "choose_kernel",
    "convolve_spans",
    "faults_of_ranks",
    "keeps_products",
    "planned_attention",
    "prove",
    "scan_spans",
    "to_device",
]
