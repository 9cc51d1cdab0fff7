"""Feeds in the process of the test, in place of those of nodes and of actors."""

import pickle
from contextlib import contextmanager
from dataclasses import replace

from lengthwise.data.feed import Feed
from lengthwise.data.feed_dataset import divided, streamed


class LocalClient:
    """Asks a feed that is here. ends_after: of so many calls, after each of which it is made anew."""

    def __init__(self, spec, ends_after=None, run=map):
        self.spec, self._ends_after, self._run, self._calls = pickle.dumps(spec), ends_after, run, 0
        self.feed = Feed(pickle.loads(self.spec), run)

    def __call__(self, method, *arguments):
        self._calls += 1
        if self._ends_after and self._calls % self._ends_after == 0:
            self.end()
        answer = getattr(self.feed, method)(*arguments)
        return lambda: answer

    def end(self):
        """Make the feed anew, as one that was killed."""
        self.feed.close()
        self.feed = Feed(pickle.loads(self.spec), self._run)


@contextmanager
def local_feeds(
    sources, how, *, seed=0, ranks=1, ends_after=None, run=map, vocab_size=256, tokenizer_name="bytes", **changes
):
    """Give a dataset of each of some ranks that ask the same feeds, and the clients of these.

    how: `remote` and of how many feeds a source, or `streaming` and of which block. changes: of the feeds' specs.
    """
    ((key, number),) = how.items()
    sources = [each.model_copy(update={key: number}) for each in sources]
    of_all = {"tokenizer_name": tokenizer_name, "vocab_size": vocab_size, "tokenizer_digest": "", "seed": seed}
    made = [streamed(sources, **of_all) if key == "streaming" else divided(sources, **of_all) for _ in range(ranks)]
    specs = [replace(spec, clients=ranks, **changes) for spec in made[0].specs]
    clients = [LocalClient(spec, ends_after, run) for spec in specs]
    try:
        for number, each in enumerate(made):
            each.attach(clients, number)
        yield made, clients
    finally:
        for each in clients:
            each.feed.close()
