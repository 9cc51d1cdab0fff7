"""Files that someone names: what is none, or has no end, is an error at once; JSON has every key once."""

import errno
import fcntl
import os
import threading

import pytest

from lengthwise.core.files import claim, parse_json, read_json, read_plain


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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 1}}', 'the key "c" twice'),
        ("", "an empty file"),
        (" \n", "an empty file"),
        ("\ufeff{}", "byte order mark"),
        ('{"a": 1,\n "b"}', "line 2, column 5"),
        ('"a\nb"', "control character at line 1, column 3"),
        ("[" * 100_000, "nesting"),
        ("1" * 5000, "digits"),
    ],
)
def test_parse_json_says_what_is_wrong(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_json(text)


def test_read_json_reads_what_json_reads_and_says_why_a_file_cannot_be_read(tmp_path) -> None:
    read = parse_json('{"a": [1, 2.5, null, {"a": "b"}], "c": true}\r\n')
    assert read == {"a": [1, 2.5, None, {"a": "b"}], "c": True}
    (tmp_path / "odd.json").write_bytes(b"[1, \xff]")
    for name, said in (("none.json", "No such file"), (".", "directory"), ("odd.json", "byte 0xff at offset 4")):
        with pytest.raises(ValueError, match=said):
            read_json(tmp_path / name)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EIO])
def test_a_disk_without_locks_is_claimed_with_a_warning_and_other_errors_stay(number, tmp_path, monkeypatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fails)
    is_error = number == errno.EIO
    with pytest.raises(OSError, match="Input") if is_error else pytest.warns(RuntimeWarning, match="no file locks"):
        claim(tmp_path / "lock", what="out").close()
