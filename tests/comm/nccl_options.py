"""Stands for torch's class of NCCL's options, which CPU builds do not have."""

from types import SimpleNamespace


class NcclOptions:
    """What `dist.ProcessGroupNCCL.Options` takes and has (torch 2.11 to 2.13)."""

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(blocking=-1, cga_cluster_size=-1, min_ctas=-1, max_ctas=-1)
