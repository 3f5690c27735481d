"""The token map made in a process of its own: the same map, the same errors, and nothing left behind."""

import gc
import os
import subprocess

import numpy as np
import pytest
from checkpoints import TOKENIZER

from ssdgram.errors import TokenMapError
from ssdgram.layout import compression
from ssdgram.token_map import token_map


@pytest.fixture(autouse=True)
def every_size_in_a_process(monkeypatch):
    monkeypatch.setattr(compression, "SMALL_BYTES", 0)


def test_the_same_map():
    with compression.TokenMapProcess(TOKENIZER) as process:
        assert process._process is not None
        assert np.array_equal(process.result(), token_map(TOKENIZER)) and process.result().dtype == np.int32
        assert process._process.returncode == 0 and process.done()


def test_the_same_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with compression.TokenMapProcess(tmp_path / "tokenizer.json") as process, pytest.raises(TokenMapError, match="decoder"):
        process.result()
    with compression.TokenMapProcess(tmp_path / "none.json") as process, pytest.raises(TokenMapError, match="cannot be read"):
        process.result()


def test_no_process_to_be_had(monkeypatch):
    def refuse(*_, **__):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with compression.TokenMapProcess(TOKENIZER) as process:
        assert process.done() and np.array_equal(process.result(), token_map(TOKENIZER))


def test_a_small_tokenizer_needs_none(monkeypatch):
    monkeypatch.setattr(compression, "SMALL_BYTES", 1 << 30)
    with compression.TokenMapProcess(TOKENIZER) as process:
        assert process._process is None and np.array_equal(process.result(), token_map(TOKENIZER))


def test_the_process_does_not_outlive_its_owner():
    gc.collect()                                             # what other tests left open is closed now, not below
    before = len(os.listdir("/proc/self/fd"))
    with compression.TokenMapProcess(TOKENIZER) as process:
        number = process._process.pid
    assert process._process.returncode is not None and len(os.listdir("/proc/self/fd")) <= before
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
