"""The benchmark of GPUDirect Storage, its parts without a GPU on a small store: what it says is what was there."""

import json

import pytest
from click.testing import CliRunner
from fake_cufile import FakeCufile, FakePort
from made_stores import QUEUES

from ssdgram import _gds
from ssdgram.bench import gds

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A few seconds instead of minutes, over a fake cuFile."""
    for name, value in (("POSITIONS", 20), ("ROUNDS", 2), ("SINGLES", 2), ("FILL", 160), ("DRAM", "16MiB")):
        monkeypatch.setattr(gds, name, value)
    monkeypatch.setattr(_gds, "open_port", lambda device: FakePort(FakeCufile("nvfs")))


def test_both_queues_are_served_in_turn(engram):
    found = gds.serve(engram.out, "cpu", ["gds", *QUEUES[:1]])["queues"]
    assert found["gds"]["mode"] == "gds" and found["gds"]["counters"]["nvfs"] > 0
    for queue in found.values():
        assert queue["wrong_rows"] == 0 and queue["reads_per_s"] > 0 and queue["token_us"] > 0


def test_what_does_not_open_is_said_and_the_rest_goes_on(engram, monkeypatch):
    def refuse(device):
        from ssdgram.errors import UnavailableError

        raise UnavailableError("no driver")

    monkeypatch.setattr(_gds, "open_port", refuse)
    found = gds.serve(engram.out, "cpu", ["gds", "threads"])["queues"]
    assert found["gds"] == {"error": "UnavailableError: no driver"} and found["threads"]["wrong_rows"] == 0
    assert gds.damage(engram.out, "cpu", ["gds"]) == {"gds": {"error": "UnavailableError: no driver"}}


def test_a_damaged_row_is_caught_and_the_file_is_as_it_was(engram):
    before = (engram.out / "layer-001/column-00.rows").read_bytes()
    found = gds.damage(engram.out, "cpu", ["gds", "threads"])
    assert all(queue["caught"] and queue["wrong_rows_after"] == 0 for queue in found.values()), found
    assert (engram.out / "layer-001/column-00.rows").read_bytes() == before


def test_the_hot_set_is_loaded_and_compared(engram, tmp_path):
    found = gds.hot_set(engram.out, tmp_path, "cpu", ["gds", "threads"], "8MiB")
    assert found["bytes"] == (tmp_path / "hot").stat().st_size
    for queue in found["queues"].values():
        assert queue["bundles"] > 100 and queue["wrong_rows"] == 0 and queue["share_of_sequential_rate"] > 0


def test_a_part_reports_from_a_process_of_its_own(engram, tmp_path):
    found = gds.run_part("damaged", engram.out, tmp_path, "cpu", ["threads"], "8MiB")
    assert found["threads"]["caught"]
    assert "ManifestError" in gds.run_part("damaged", tmp_path / "nothing", tmp_path, "cpu", ["threads"], "8MiB")["threads"]["error"]


def test_the_command_explains_itself():
    result = CliRunner().invoke(gds.main, ["--help"])
    assert result.exit_code == 0 and "--dir" in result.output and json.dumps(result.output)
