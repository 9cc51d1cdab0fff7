"""Shards in the process of the test, in place of actors."""

from dataclasses import replace

from lengthwise.data.remote import RemoteDataset, shard_specs
from lengthwise.data.shard import Shard


class LocalClient:
    """Asks a shard that is here. `ends_after`: of so many calls, after each of which it is made anew."""

    def __init__(self, spec, ends_after=None):
        self.spec, self._ends_after, self._calls = spec, ends_after, 0
        self.shard = Shard(spec)

    def ask(self, method, *arguments):
        self._calls += 1
        if self._ends_after and self._calls % self._ends_after == 0:
            self.shard.close()
            self.shard = Shard(self.spec)
        answer = getattr(self.shard, method)(*arguments)
        return lambda: answer


def remote(sources, *, tokenizer_name="bytes", vocab_size=256, seed=0, part_bytes=200, ends_after=None, **changes):
    """Return a remote dataset of sources, and the clients that it asks; `changes`: of the shards' specs."""
    made = shard_specs(sources, tokenizer_name=tokenizer_name, vocab_size=vocab_size, seed=seed, part_bytes=part_bytes)
    dataset = RemoteDataset([replace(each, **changes) for each in made], tokenizer_digest="", seed=seed)
    clients = [LocalClient(spec, ends_after) for spec in dataset.specs]
    try:
        dataset.attach(clients)
    except BaseException:
        for each in clients:
            each.shard.close()
        raise
    return dataset, clients
