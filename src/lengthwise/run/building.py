"""Open a session of a run's model: for `train`, and for `verify`, which thereby tests it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lengthwise.comm import Transport, World
from lengthwise.data.image_files import PixelsAhead
from lengthwise.engine.batch import ReadsFiles
from lengthwise.models import image_reader
from lengthwise.planner.service.process import PlannerProcess
from lengthwise.run.checks import session_options, stored_model
from lengthwise.run.job import Job
from lengthwise.session import Session
from lengthwise.session.ranks import SessionRanks


def open_session(
    job: Job,
    world: World,
    transport: Transport,
    process: PlannerProcess | None = None,
    *,
    say: Callable[[str], None],
    draws_both: bool = False,
) -> Session:
    """Return a session of the job's model, with the optimizer of its run file. Collective.

    say: function that rank 0 calls with lines on how the model computes. draws_both: as in `build_adapted`.
    """
    ranks = SessionRanks(transport=transport, local_ranks=world.local_size, planner=process, say=say, is_run=True)
    return Session(
        stored_model(job.config, job.model, draws_both=draws_both, sees=job.has_images),
        job.config.optimizer,
        ranks=ranks,
        device=world.device,
        lengths=job.known.lengths[job.known.ids].tolist(),
        batch_tokens=job.most_tokens,
        seed=job.config.seed,
        timeout_seconds=job.timeout_seconds,
        **session_options(job.config),
    )


def laid_out(job: Job, session: Session) -> Job:
    """Return the job with the session's layout, which reads images by the session's model."""
    asked, sees = session.settings.asked, None
    if job.has_images and (reader := image_reader(session.engine.model)) is not None:
        assert job.tokenizer is not None, "it has found the images"
        sees = ReadsFiles(reader, PixelsAhead(job.tokenizer.images))
    layout = {"shard": asked.shard, "ranks_per_node": asked.ranks_per_node}
    return replace(job, config=job.config.model_copy(update=layout), sees=sees)
