"""Every way to put a few sequences into groups: what the bound and the oracle are held against."""

from collections.abc import Iterator, Sequence


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield every way to put items, by index, into groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for i, group in enumerate(rest):
            yield [*rest[:i], [items[0], *group], *rest[i + 1 :]]
