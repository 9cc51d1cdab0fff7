"""The claim of a run on the URL of its output, and what is done there when it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from lengthwise.comm import World
from lengthwise.config import RunConfig
from lengthwise.core.errors import LengthwiseError, OutputError
from lengthwise.core.locks import try_lock
from lengthwise.core.remote import RemoteFolder, storing
from lengthwise.training.folder import LOCK, RUN_NAMES, UPLOADED, RunFolder
from lengthwise.training.marker import Ownership, in_time, still_owns
from lengthwise.training.run_files import RunFiles


@contextlib.contextmanager
def claimed_url(config: RunConfig, say: Callable[[str], None], *, overwrite: bool, resume: bool) -> Iterator[None]:
    """Keep other runs out of the output's URL inside the block, as far as a store can; the folder here is locked.

    A folder here that another machine's run has left behind is emptied: its URL knows better. What was written since
    the last copy by a run that failed, stacks of ranks that hung say, goes there as far as it can.

    Raises:
        OutputError: another run is writing there; it holds a run, which is neither to be deleted nor to go on.
        KeyboardInterrupt: with what is at the URL.
    """
    assert config.url is not None, "of an output that is a URL"
    with storing(config.url, OutputError):
        remote = RemoteFolder(config.url)
        there = {name.partition("/")[0] for name in remote.sizes()} & RUN_NAMES
    if there and not overwrite and not resume:
        remedy = "Choose another output, or give {overwrite} to delete that run, or {resume} to go on with it."
        raise OutputError(
            config.url, expected="no run at the output's URL", got=", ".join(sorted(there)), remedy=remedy
        )
    ownership = Ownership(remote, config.folder, say)
    try:
        if not ownership.take():
            RunFolder(config.folder).clear()
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_at(config)) from None
    except LengthwiseError:
        in_time(lambda: _copy_last(remote, config))
        raise
    finally:
        ownership.release()


def _copy_last(remote: RemoteFolder, config: RunConfig) -> None:
    if still_owns(remote, config.folder):
        RunFiles(remote, config.folder, config.most_log_mb * 1e6).copy_small()


@contextlib.contextmanager
def held_here(config: RunConfig, world: World) -> Iterator[bool]:
    """Keep other runs out of the folder of a machine that has not rank 0; yield whether it is one, for this rank.

    Raises:
        OutputError: another run holds it, or two machines share it.
    """
    if config.url is None or world.local_rank or not world.rank:
        yield False
        return
    with storing(config.url, OutputError):
        config.folder.mkdir(parents=True, exist_ok=True)
        lock = try_lock(config.folder / LOCK)
    if isinstance(lock, str):
        expected, remedy = "a folder of this machine alone", "Set LENGTHWISE_CACHE to a folder of its own here."
        raise OutputError(str(config.folder), expected=expected, got=f"one that {lock} is writing", remedy=remedy)
    with lock:
        yield True


def _at(config: RunConfig) -> str:
    step = "0"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        step = (config.folder / UPLOADED).read_text(encoding="ascii")
    told = "no checkpoint is" if step == "0" else f"the checkpoint after step {step} is the newest"
    return f"{told} at {config.url}"
