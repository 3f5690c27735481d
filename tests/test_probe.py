"""What the choice of a queue depends on, on made-up machines."""

import errno
import os

import pytest

from ssdgram.queues import probe


@pytest.mark.parametrize(("error", "files", "words"), [
    (errno.EPERM, {"proc/sys/kernel/io_uring_disabled": "2\n"}, "switched off for everyone"),
    (errno.EPERM, {"proc/sys/kernel/io_uring_disabled": "1\n"}, "unprivileged"),
    (errno.EPERM, {"proc/sys/kernel/io_uring_disabled": "0\n", "proc/self/status": "Seccomp:\t2\n"}, "seccomp"),
    (errno.ENOSYS, {}, "no io_uring"),
    (errno.ENOMEM, {}, "locked memory"),
])
def test_a_refusal_has_its_reason(tmp_path, monkeypatch, error, files, words):
    def refuse(entries, completions):
        raise OSError(error, os.strerror(error))

    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(probe, "Ring", refuse)
    finding = probe.io_uring(tmp_path)
    assert not finding.ok
    assert words in finding.found


def test_processors_are_those_of_set_and_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert probe.cpu_count(tmp_path) == 8
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/pod").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod\n")
    for quota, expected in (("max 100000", 8), ("250000 100000", 3), ("20000 100000", 1), ("1600000 100000", 8)):
        (tmp_path / "sys/fs/cgroup/pod/cpu.max").write_text(quota + "\n")
        assert probe.cpu_count(tmp_path) == expected
