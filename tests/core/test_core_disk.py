"""Reading a file that someone names: what is none, or has no end, is an error at once."""

import os
import threading

import pytest

from lengthwise.core.files import read_plain


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: os.mkfifo(path), "a device or a pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "a device or a pipe"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.symlink_to(path), "symbolic links"),
        (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40), "more than 1,000 bytes"),
    ],
    ids=["pipe", "device", "folder", "link to itself", "too large"],
)
def test_what_is_no_plain_file_is_refused_at_once(tmp_path, make, said):
    make(tmp_path / "file")
    with pytest.raises(OSError, match=said):
        read_plain(tmp_path / "file", most_bytes=1000)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_names_that_no_file_can_have_are_an_os_error(tmp_path, name):
    with pytest.raises(OSError):  # noqa: PT011 - the words are the system's
        read_plain(f"{tmp_path}/{name}")


def test_a_pipe_of_the_shell_is_read_to_its_end():
    """`--lengths <(command)`"""
    reading, writing = os.pipe()
    content = b"x" * 200_000  # more than a pipe holds
    writer = threading.Thread(target=write_all, args=(writing, content))
    writer.start()
    assert read_plain(f"/dev/fd/{reading}") == content
    writer.join()
    os.close(reading)


def write_all(descriptor, content):
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
