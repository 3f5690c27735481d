"""The doctor: facts from made-up machines, judgements, and what the command prints. No GPU driver is opened for it."""

import errno
import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from ssdgram import doctor, machine
from ssdgram.cli import main


def machine_with(root, files):
    """A made-up /: path -> text."""
    for path, text in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return root


V2, V1 = {"proc/self/cgroup": "0::/a/b\n"}, {"proc/self/cgroup": "4:cpu,cpuacct:/x\n"}


@pytest.mark.parametrize(("files", "quota"), [
    ({}, None),
    ({**V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
    ({**V2, "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
    ({**V2, "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 0.5),
    ({**V2, "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),            # in a container the path is that of the host
    ({**V2, "sys/fs/cgroup/a/b/cpu.max": "nonsense\n"}, None),
    ({**V2, "sys/fs/cgroup/a/b/cpu.max": "100 0\n"}, None),
    ({**V1, "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "250000\n",
      "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n"}, 2.5),
    ({**V1, "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "50000\n", "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n"}, 0.5),
    ({**V1, "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n"}, None),
])
def test_cpu_quota(tmp_path, files, quota):
    assert machine.cpu_quota(machine_with(tmp_path, files)) == quota


@pytest.mark.parametrize(("files", "limit"), [
    ({}, None),
    ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, None),
    ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "1073741824\n", "sys/fs/cgroup/memory.max": "4096\n"}, 4096),
    ({"proc/self/cgroup": "5:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ({"proc/self/cgroup": "5:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "2147483648\n"}, 2 << 30),
    ({"proc/self/cgroup": "5:cpu:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "2147483648\n"}, None),
])
def test_memory_limit(tmp_path, files, limit):
    assert machine.memory_limit(machine_with(tmp_path, files)) == limit


def test_file_system_is_that_of_the_innermost_mount(tmp_path):
    inner = tmp_path / "store"
    inner.mkdir()
    root = machine_with(tmp_path / "root", {"proc/self/mountinfo": "\n".join([
        "1 0 254:0 / / rw - ext4 /dev/vda rw",
        f"2 1 0:9 / {tmp_path}/sto rw - nfs server:/x rw",
        f"3 1 259:1 / {inner} rw,relatime shared:7 - xfs /dev/nvme0n1p1 rw",
        "broken line",
    ])})
    assert machine.file_system(inner, root) == ("xfs", "/dev/nvme0n1p1")
    assert machine.file_system(tmp_path, root) == ("ext4", "/dev/vda")
    assert machine.file_system(inner, tmp_path / "nowhere") == ("unknown", "unknown")


def test_block_device_of_a_partition_is_its_drive(tmp_path):
    number = os.stat(tmp_path).st_dev
    root = tmp_path / "root"
    partition = root / "sys/devices/pci/block/nvme0n1/nvme0n1p1"
    partition.mkdir(parents=True)
    (partition.parent / "queue").mkdir()
    (root / "sys/dev/block").mkdir(parents=True)
    (root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}").symlink_to(partition)
    assert machine.block_device(tmp_path, root) == partition.parent.resolve()
    assert machine.block_device(tmp_path, tmp_path / "nowhere") is None


def test_direct_io_is_tried_and_leaves_nothing(tmp_path):
    assert machine.direct_io_error(tmp_path) in (None, errno.EINVAL, errno.EOPNOTSUPP)
    assert list(tmp_path.iterdir()) == []
    assert machine.direct_io_error(tmp_path / "absent") == -1


def test_chosen_reads_the_bracketed_word(tmp_path):
    file = tmp_path / "enabled"
    file.write_text("always [madvise] never\n")
    assert machine.chosen(file) == "madvise"
    assert machine.chosen(tmp_path / "absent") == "unknown"


@pytest.mark.parametrize(("release", "version"),
                         [("6.18.44-x", (6, 18)), ("5.4", (5, 4)), ("6.1-rc3", (6, 1)), ("strange", (0, 0))])
def test_kernel_version(release, version):
    assert doctor.kernel_version(release) == version


@pytest.mark.parametrize(("error", "files", "reason"), [
    (errno.ENOSYS, {}, "no io_uring"),
    (errno.EPERM, {"proc/sys/kernel/io_uring_disabled": "2\n"}, "switched off for everyone"),
    (errno.EPERM, {"proc/sys/kernel/io_uring_disabled": "1\n"}, "switched off for unprivileged"),
    (errno.EPERM, {"proc/sys/kernel/io_uring_disabled": "0\n", "proc/self/status": "Name:\tx\nSeccomp:\t2\n"}, "seccomp profile"),
    (errno.EPERM, {"proc/self/status": "Seccomp:\t0\n"}, "security module"),
    (errno.ENOMEM, {}, "limit is too low"),
    (errno.EINVAL, {}, "no reason"),
])
def test_a_refusal_is_explained(tmp_path, error, files, reason):
    assert reason in doctor.why_refused(error, machine_with(tmp_path, files))


def findings(folder, root):
    return {finding.subject: finding for finding in doctor.examine(folder, root)}


def test_a_machine_with_a_gpu_and_gds(tmp_path):
    root = machine_with(tmp_path / "root", {
        "dev/nvidia0": "", "dev/nvidiactl": "",
        "proc/driver/nvidia/version": "NVRM version: 580.1\nGCC\n", "proc/driver/nvidia-fs/stats": "",
        "sys/devices/system/node/node0/x": "", "sys/devices/system/node/node1/x": "",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "proc/cpuinfo": "flags : fpu sse4_1\n", "proc/meminfo": "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n",
    })
    found = findings(tmp_path, root)
    assert found["GPU"].verdict == doctor.OK and "1 NVIDIA device" in found["GPU"].found and "580.1" in found["GPU"].found
    assert "nvidia-fs loaded" in found["GPUDirect Storage"].found
    assert found["huge pages"].verdict == doctor.OK
    assert found["NUMA"].found == "2 nodes"
    assert found["CRC-32C"].verdict == doctor.SLOW
    assert found["memory"].verdict == doctor.SLOW and found["memory"].found.startswith("0.5 GiB free of 1.0 GiB")


def test_an_empty_machine_breaks_nothing(tmp_path):
    found = findings(tmp_path, tmp_path / "nothing")
    assert found["GPU"].verdict == doctor.NOTE
    assert "NUMA" not in found and "drive" not in found
    assert found["huge pages"].verdict == doctor.NOTE and "madvise" in found["huge pages"].advice
    for finding in found.values():
        assert finding.verdict in (doctor.OK, doctor.SLOW, doctor.MISSING, doctor.NOTE)
        assert finding.found and finding.wanted
        assert finding.advice or finding.verdict in (doctor.OK, doctor.NOTE), finding


def test_a_folder_that_is_not_there(tmp_path):
    assert findings(tmp_path / "absent", tmp_path)["folder"].verdict == doctor.MISSING


def test_the_command_prints_a_table_and_json(tmp_path):
    table = CliRunner().invoke(main, ["doctor", str(tmp_path)], env={"COLUMNS": "200"})
    assert table.exit_code == 0, table.output
    for subject in ("io_uring", "locked memory", "open files", "direct I/O", "huge pages", "GPUDirect Storage", "compiled code"):
        assert subject in table.output
    assert "to do:" not in table.output or "wanted:" in table.output
    listed = CliRunner().invoke(main, ["doctor", "--json", str(tmp_path)])
    assert {"subject", "found", "wanted", "verdict", "advice"} == set(json.loads(listed.output)[0])


def test_a_pipe_of_80_columns_can_be_read(tmp_path, monkeypatch):
    long = doctor.Finding("SSDGRAM_STORE", "not set", "the store's folder", doctor.MISSING, "export SSDGRAM_STORE=FOLDER")
    monkeypatch.setattr("ssdgram.cli.doctor.examine", lambda folder: [long])
    lines = [line.rstrip() for line in CliRunner().invoke(main, ["doctor"], env={"COLUMNS": "80"}).output.splitlines()]
    assert [" ".join(line.split()) for line in lines] == [
        "missing SSDGRAM_STORE not set", "wanted: the store's folder", "to do: export SSDGRAM_STORE=FOLDER"]


def test_strict_tells_scripts():
    answer = CliRunner().invoke(main, ["doctor", "--strict", "--json", "absent-folder"])
    assert answer.exit_code == 1 and json.loads(answer.output)


def test_neither_torch_nor_a_driver_is_loaded(tmp_path):
    program = (f"import sys, pathlib; from ssdgram.doctor import examine; examine(pathlib.Path({str(tmp_path)!r}));"
               "loaded = [m for m in ('torch', 'triton', 'cuda', 'kvikio') if m in sys.modules];"
               "maps = open('/proc/self/maps').read();"
               "sys.exit(str(loaded) if loaded or 'libcuda' in maps or 'libcufile' in maps else 0)")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("found, verdict, words", [
    ({"error": "cuFile has not answered for 60 s"}, doctor.NOTE, "not usable: cuFile has not answered for 60 s"),
    ({"mode": "compatibility", "counters": {"posix": 4, "nvfs": 0}, "version": 1200}, doctor.NOTE,
     r"compatibility, by cuFile's own counters \(posix 4\); cuFile 1200"),
    ({"mode": "gds", "counters": {"nvfs": 1}}, doctor.OK, r"gds, by cuFile's own counters \(nvfs 1\)"),
    ({"mode": "unknown", "counters": {}}, doctor.NOTE, r"unknown, by cuFile's own counters \(no counters\)")])
def test_the_gds_mode_is_what_cufile_counted(found, verdict, words):
    finding = doctor.gds_mode(found)
    assert finding.verdict == verdict and re.search(words, finding.found)


def test_a_probe_that_hangs_or_dies_is_ended(tmp_path, monkeypatch):
    from ssdgram import _cufile

    monkeypatch.setattr(_cufile, "PROBE", "import time; time.sleep(60)")
    assert _cufile.probe_in_child(tmp_path, timeout_s=0.5) == {"error": "cuFile has not answered for 0.5 s"}
    monkeypatch.setattr(_cufile, "PROBE", "raise SystemExit('no driver')")
    assert _cufile.probe_in_child(tmp_path)["error"] == "the process that asked ended with status 1: no driver"
    monkeypatch.setattr(_cufile, "PROBE", "import sys; print('noise'); print('{\"error\": \"' + sys.argv[1] + '\"}')")
    assert _cufile.probe_in_child(tmp_path) == {"error": str(tmp_path)}
