"""The default batch has packs and padded microbatches for as many ranks as a small machine starts."""

from itertools import chain

from lengthwise.core.shape import Cluster
from sharding import documents, pack, pad


def test_every_rank_has_as_many_microbatches_of_the_default_batch():
    for ranks in (2, 3, 4):
        cluster = Cluster(ranks=ranks, capacity_tokens=2048)
        for seed in range(3):
            lengths = documents(8192, seed, 1024)
            assert sum(lengths) - lengths[-1] < 8192 <= sum(lengths)
            for made in (pack(lengths, cluster), pad(lengths, cluster)):
                assert len({len(of_rank) for of_rank in made}) == 1
                assert sorted(chain(*chain(*made))) == list(range(len(lengths)))
