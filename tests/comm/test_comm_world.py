"""Who this process is: torchrun's environment, read whole or not at all."""

import os

import pytest

from lengthwise.comm import world_from_environment
from lengthwise.core.errors import ConfigError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}  # fmt: skip
INTEL_MPI = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "8"}


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    kept = {name: value for name, value in os.environ.items() if name not in (*TORCHRUN, "LOCAL_WORLD_SIZE")}
    monkeypatch.setattr(os, "environ", kept)  # a plain one: what is set in it is gone afterwards


@pytest.mark.parametrize("variables", [{}, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}])
def test_world_is_none_when_started_alone(variables):
    os.environ.update(OPEN_MPI | variables if variables else {})
    assert world_from_environment() is None


def test_world_is_read_from_torchrun():
    os.environ.update(TORCHRUN)
    world = world_from_environment()
    assert world is not None
    assert (world.rank, world.world_size, world.local_rank, world.rendezvous) == (3, 8, 1, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR=None"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK=None"),
        *(({name: value}, "environment") for name, value in (("RANK", "x"), ("WORLD_SIZE", "-1"), ("LOCAL_RANK", ""))),
        ({"RANK": "8"}, "RANK=8"),
    ],
    ids=str,
)
def test_world_refuses_an_environment_that_is_not_whole(changes, said):
    os.environ.update({name: value for name, value in (TORCHRUN | changes).items() if value is not None})
    with pytest.raises(ConfigError, match=said):
        world_from_environment()


@pytest.mark.parametrize("variables", [OPEN_MPI, INTEL_MPI])
def test_world_is_read_from_mpirun(variables):
    os.environ.update(variables)
    world = world_from_environment()
    assert world is not None
    assert (world.rank, world.world_size, world.local_rank, world.local_size) == (3, 8, 1, 8)
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert world_from_environment() == world


def test_ranks_of_mpirun_on_several_machines_are_told_where_to_meet():
    os.environ.update(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    with pytest.raises(ConfigError, match="where ranks meet"):
        world_from_environment()
    os.environ.update(MASTER_ADDR="first", MASTER_PORT="29511")
    assert world_from_environment() is not None
    assert os.environ["MASTER_ADDR"] == "first"
