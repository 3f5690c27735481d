"""NUMA: the GPU's node as sysfs tells it, its CPUs, and memory that is taken from a node; nothing here fails an open."""

import mmap
import os

import numpy as np
import pytest

from ssdgram import _numa
from ssdgram._arena import Arena


@pytest.fixture
def machine(tmp_path):
    """Two nodes, a GPU on the second."""
    cpu = min(os.sched_getaffinity(0))
    for node, cpus in ((0, "100000-100003"), (1, f"{cpu},100004-100007")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    return tmp_path


def test_the_gpus_node(machine):
    assert _numa.nodes(machine) == [0, 1]
    assert _numa.node_of_gpu("0000:3B:00.0", machine) == 1


@pytest.mark.parametrize("text", ["-1\n", "7\n", "", "x"])
def test_a_node_that_is_not_told_is_none(machine, text):
    (machine / "sys/bus/pci/devices/0000:3b:00.0/numa_node").write_text(text)
    assert _numa.node_of_gpu("0000:3b:00.0", machine) is None
    assert _numa.node_of_gpu("0000:ff:00.0", machine) is None
    assert _numa.node_of_gpu("", machine) is None


def test_one_node_is_none(machine):
    (machine / "sys/devices/system/node/node0/cpulist").unlink()
    (machine / "sys/devices/system/node/node0").rmdir()
    assert _numa.node_of_gpu("0000:3b:00.0", machine) is None


def test_cpus_are_those_that_this_process_may_use(machine):
    assert _numa.cpus_of(1, machine) == (min(os.sched_getaffinity(0)),)
    assert _numa.cpus_of(0, machine) == () == _numa.cpus_of(5, machine)
    (machine / "sys/devices/system/node/node1/cpulist").write_text("nonsense")
    assert _numa.cpus_of(1, machine) == ()


def test_a_node_that_does_not_exist_is_refused_and_memory_works_all_the_same():
    memory = mmap.mmap(-1, 1 << 20)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    assert not _numa.prefer(address, 1 << 20, 60) and not _numa.prefer(address, 1 << 20, -1)
    memory[:4] = b"here"
    assert memory[:4] == b"here"


@pytest.mark.skipif(0 not in _numa.nodes(), reason="this kernel knows no NUMA nodes")
def test_an_arena_is_taken_from_a_node():
    arena = Arena([("a", np.int64, (1000,)), ("b", np.int64, (1000,))], private={"b"})
    assert arena.prefer_node(0)
    with open("/proc/self/numa_maps") as file:
        policies = {int(line.split()[0], 16): line.split()[1] for line in file}
    for address, _, _ in arena._regions:
        start = max(place for place in policies if place <= address)
        assert policies[start] == "prefer:0"
    arena["a"][:] = 7
    arena["b"][:] = 8
    assert (arena["a"] == 7).all() and (arena["b"] == 8).all()
    arena.close()
