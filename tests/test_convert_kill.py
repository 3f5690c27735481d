"""kill -9 at random points of a conversion: before its end nobody can open the store, after a resume every digest is the same.

The converter runs in a forked child (compiled code is loaded already, so a conversion takes a fraction of a second) and gets
SIGKILL after a random time. A child that ended before its signal does not count.
"""

import os
import random
import signal
import time

import pytest
from checkpoints import files_below, small_engram

from ssdgram.errors import ManifestError
from ssdgram.layout.convert import convert
from ssdgram.layout.manifest import Manifest
from ssdgram.layout.verify import verify

KILLS = 10


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Checkpoint, the manifest of an undisturbed conversion, and how long it took."""
    folder = tmp_path_factory.mktemp("source")
    ckpt = small_engram(folder / "ckpt", 20_000, heads=4, head_dim=128)
    convert(ckpt, folder / "warm")                           # compiles and caches
    start = time.monotonic()
    manifest = convert(ckpt, folder / "whole")
    return ckpt, manifest, time.monotonic() - start


def killed_after(seconds, ckpt, out):
    """Convert in a child that is killed after `seconds`; whether the signal came before its end."""
    child = os.fork()
    if child == 0:
        try:
            convert(ckpt, out)
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def journaled(out):
    """Paths' states of the columns that the journal has, if there is one."""
    try:
        lines = (out / "conversion.journal").read_text().split("\n")[1:-1]
    except FileNotFoundError:
        return None
    return [int(line.split('"file": ')[1].split(",")[0]) for line in lines]


def test_killed_at_random_points_and_resumed(source, tmp_path):
    ckpt, whole, seconds = source
    draw = random.Random(20260912)
    kills, partial = 0, 0
    for attempt in range(20 * KILLS):
        out = tmp_path / str(attempt)
        if not killed_after(draw.uniform(0, 1.1 * seconds), ckpt, out):
            seconds *= 0.9                                   # the machine was busier as the conversion was timed,
            continue
        kills += 1
        if not (out / "manifest.json").exists():             # else the signal came between publishing and the end
            with pytest.raises(ManifestError):
                Manifest.load(out)
        done = journaled(out)
        if not done:
            seconds *= 1.2                                   # ... or it is busier now: the next gets further
        before = files_below(out) if out.exists() else {}
        assert convert(ckpt, out) == whole
        if done:
            partial += len(done) < len(whole.files)
            after = files_below(out)
            for index in done:                               # finished columns were not rewritten
                path = str(out / whole.files[index].path)
                assert after[path] == before[path]
        assert verify(out, ckpt).ok and not (out / "conversion.journal").exists()
        if kills >= KILLS and partial > 0:
            break
    assert kills >= KILLS and partial > 0


def test_killed_again_and_again(source, tmp_path):
    """One store, killed at every step of the way; each run gets a little further."""
    ckpt, whole, seconds = source
    draw = random.Random(7)
    out = tmp_path / "out"
    for attempt in range(200):
        if not killed_after(seconds * draw.uniform(0.1, 0.6) * (1 + attempt / 20), ckpt, out):
            break
        if not (out / "manifest.json").exists():
            with pytest.raises(ManifestError):
                Manifest.load(out)
    assert Manifest.load(out) == whole and verify(out, ckpt).ok
