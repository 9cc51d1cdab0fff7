"""The batches on which planners are compared: published length sets drawn again, and the standard library's own files.

Lengths are clipped to 0.98 of what all ranks hold together, so that every planner can plan every batch.
"""

from __future__ import annotations

import random
import sysconfig
from functools import cache
from pathlib import Path

from lengthwise.core.shape import Cluster
from lengthwise.data.recipes import draw_lengths

STDLIB = "stdlib"
_TEST_FOLDERS = {"test", "tests", "idle_test", "lib2to3", "site-packages", "__pycache__"}


def clip_tokens(cluster: Cluster) -> int:
    """Return the longest that a sequence of any batch may be, in tokens."""
    return max(1, int(0.98 * cluster.longest_tokens))


def sequences_batch(source: str, count: int, seed: int, cluster: Cluster) -> list[int]:
    """Draw `count` lengths of a source."""
    tokens = 1024 * count
    while len(lengths := tokens_batch(source, tokens, seed, cluster)) < count:
        tokens *= 2
    return lengths[:count]


def tokens_batch(source: str, tokens: int, seed: int, cluster: Cluster) -> list[int]:
    """Draw lengths of a source that sum to `tokens`."""
    clip = clip_tokens(cluster)
    if source != STDLIB:
        return draw_lengths(source, tokens, seed, longest_tokens=clip)
    choose, lengths, left = random.Random(seed), list[int](), tokens
    while left > 0:
        lengths.append(min(choose.choice(stdlib_lengths()), clip, left))
        left -= lengths[-1]
    return lengths


@cache
def stdlib_lengths() -> tuple[int, ...]:
    """List the sizes in bytes of `stdlib_files`."""
    return tuple(path.stat().st_size for path in stdlib_files())


def stdlib_files() -> list[Path]:
    """List the standard library's modules; test folders and empty files are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in sorted(root.rglob("*.py")) if not _TEST_FOLDERS & set(path.relative_to(root).parts))
    return [path for path in files if path.stat().st_size > 0]


def tiny_batch(seed: int) -> tuple[list[int], Cluster]:
    """Draw a step for the oracle: 2 to 8 ranks, 2 to 10 sequences, log-uniform from 512 to 46K tokens."""
    choose = random.Random(seed)
    cluster = Cluster(ranks=choose.randint(2, 8), capacity_tokens=8192)
    lengths = [int(2 ** choose.uniform(9, 15.5)) for _ in range(choose.randint(2, 10))]
    return [min(length, clip_tokens(cluster)) for length in lengths], cluster
