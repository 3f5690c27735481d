"""What the operating system refuses becomes one error that says where, why, what is left, and what to do."""

import errno
import os

import pytest

from ssdgram.errors import ConversionError, NoSpaceError, ReadError, SSDGramError
from ssdgram.layout.writing import writing


@pytest.mark.parametrize(("number", "kind", "advice"), [
    (errno.ENOSPC, NoSpaceError, "make room"), (errno.EDQUOT, NoSpaceError, "make room"),
    (errno.EFBIG, ConversionError, "ulimit -f"), (errno.EACCES, ConversionError, "choose a folder"),
    (errno.EROFS, ConversionError, "choose a folder"), (errno.EIO, ConversionError, "when the cause is removed"),
])
def test_a_refusal_says_where_why_and_what_to_do(number, kind, advice):
    with pytest.raises(SSDGramError) as caught, writing("out", "half of it stays"):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is kind and caught.value.__cause__.errno == number
    text = str(caught.value)
    assert text.startswith(f"out: {os.strerror(number)}; half of it stays: ") and advice in text and "the same command again" in text


def test_the_file_is_named_if_there_is_one_and_the_result_if_there_are_two():
    with pytest.raises(ConversionError, match=r"^/a: "), writing("/out", "nothing is left"):
        raise OSError(errno.EIO, "bad", "/a")
    with pytest.raises(ConversionError, match=r"^/out: "), writing("/out", "nothing is left"):
        raise OSError(errno.EIO, "bad", "/a", None, "/b")


def test_what_says_more_already_passes():
    error = ReadError("rows")
    with pytest.raises(ReadError) as caught, writing("out", "all"):
        raise error
    assert caught.value is error
