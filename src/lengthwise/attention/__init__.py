"""Layers that mix tokens, by a plan: blockwise attention and its ring, scans with states, short convolutions."""

from lengthwise.attention.abilities import AttentionNeeds as AttentionNeeds
from lengthwise.attention.choose import check_attention as check_attention
from lengthwise.attention.choose import choose_kernel as choose_kernel
from lengthwise.attention.cuda_kernels import activate_flash as activate_flash
from lengthwise.attention.halos import convolve_spans as convolve_spans
from lengthwise.attention.kernels import Block as Block
from lengthwise.attention.kernels import BlockKernel as BlockKernel
from lengthwise.attention.kernels import FlashCpuKernel as FlashCpuKernel
from lengthwise.attention.kernels import ReferenceKernel as ReferenceKernel
from lengthwise.attention.kernels import Saved as Saved
from lengthwise.attention.packs import to_device as to_device
from lengthwise.attention.planned import PlannedAttention as PlannedAttention
from lengthwise.attention.planned import planned_attention as planned_attention
from lengthwise.attention.proof import Case as Case
from lengthwise.attention.proof import Proof as Proof
from lengthwise.attention.proof import by_autograd as by_autograd
from lengthwise.attention.proof import faults_of_ranks as faults_of_ranks
from lengthwise.attention.proof import prove as prove
from lengthwise.attention.recompute import ActivationPolicy as ActivationPolicy
from lengthwise.attention.recompute import Recomputation as Recomputation
from lengthwise.attention.recompute import keeps_products as keeps_products
from lengthwise.attention.states import Opened as Opened
from lengthwise.attention.states import scan_spans as scan_spans
