"""Who this process is: torchrun's environment, read whole or not at all."""

import pytest

from lengthwise.comm import world_from_environment
from lengthwise.core.errors import ConfigError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def test_world_is_none_when_started_alone():
    assert world_from_environment() is None


def test_world_is_read_from_torchrun(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    world = world_from_environment()
    assert world is not None
    assert (world.rank, world.world_size, world.local_rank, world.rendezvous) == (3, 8, 1, None)


@pytest.mark.parametrize("name", TORCHRUN)
def test_world_refuses_half_of_torchrun(monkeypatch, name):
    for other, value in TORCHRUN.items():
        if other != name:
            monkeypatch.setenv(other, value)
    with pytest.raises(ConfigError, match=f"{name}=None"):
        world_from_environment()


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("WORLD_SIZE", "-1"), ("LOCAL_RANK", "")])
def test_world_refuses_what_is_no_number(monkeypatch, name, value):
    for other, good in TORCHRUN.items():
        monkeypatch.setenv(other, good)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="environment"):
        world_from_environment()


def test_world_refuses_a_rank_outside_the_world(monkeypatch):
    for name, value in (TORCHRUN | {"RANK": "8"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="RANK=8"):
        world_from_environment()
