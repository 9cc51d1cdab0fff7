"""A run at s3://, against moto, a server of tests that plays S3: where s3fs and moto's server are installed."""

import os
import shutil
import socket
import subprocess
import sys
import time

import fsspec
import pytest

from lengthwise.core.faults import VARIABLE
from training.small_runs import Command, call
from training.test_training_remote import vanish
from training.test_training_resume import assert_equal_runs, run_of, whole

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")
SERVE = "import sys; sys.path[:] = sys.argv[2:]; from moto.server import main; main(['-p', sys.argv[1]])"
KEY = "AKIATESTSECRET"


@pytest.fixture
def url(tmp_path, monkeypatch):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    named = {"ENDPOINT_URL": f"http://127.0.0.1:{port}", "ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": KEY}
    for name, value in {**named, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("LENGTHWISE_CACHE", str(tmp_path / "cache"))
    with (tmp_path / "moto.log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-c", SERVE, str(port), *sys.path], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while True:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline, (tmp_path / "moto.log").read_text()
            time.sleep(0.1)
        yield "s3://bucket/runs/first"
    finally:
        server.kill()
        server.wait()


def in_a_process(work):
    """Let a child ask the store: this process, which forks ranks, keeps no loop of the library's."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_killed_run_goes_on_from_s3_alone(tmp_path, url):
    path = run_of(tmp_path)
    wanted = whole(path, ranks=2)
    output = ("--set", f"output={url}")
    in_a_process(lambda: fsspec.filesystem("s3").mkdir("bucket"))
    slow = ",".join(f"microbatches:0:{step}:sleep" for step in (3, 4, 5))
    status, out, errors = Command(
        "train", path, "--ranks", 2, *output, **{VARIABLE: f"{slow},update:1:6:kill"}
    ).finish()
    assert status == 1, errors
    assert KEY not in out + errors
    vanish(url)
    status, out, errors = Command("train", path, "--ranks", 2, "--resume", *output).finish()
    assert (status, errors) == (0, ""), errors
    assert f"fetching 2 files, 0.5 MB, of {url}" in out
    in_a_process(lambda: fsspec.filesystem("s3").get("bucket/runs/first/", f"{tmp_path}/got/", recursive=True))
    assert_equal_runs(tmp_path / "got", wanted)
    assert Command("checkpoint", "verify", url).finish()[0] == 0
    shutil.rmtree(tmp_path / "cache")
    status, _, errors = Command("train", path, "--set", "output=s3://nobucket/run").finish()
    assert status == 2
    assert "The specified bucket does not exist" in errors
    assert call("checkpoint", "verify", tmp_path / "got") == 0
