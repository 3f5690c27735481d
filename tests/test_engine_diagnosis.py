"""`ssdgram doctor --engine`: the verdict, and the line that says why not."""

import json
import socket

import pytest
from click.testing import CliRunner

from ssdgram.cli import main
from ssdgram.doctor import MISSING, OK
from ssdgram.engines import diagnosis, seams
from ssdgram.engines.vllm.seams import VLLM


@pytest.fixture
def all_well(monkeypatch, engram):
    """An environment in which the plug-in would be active."""
    import types

    monkeypatch.setattr(seams, "installed", lambda package: (VLLM.version, "/nowhere"))
    monkeypatch.setattr(seams, "differences", lambda engine, folder: [])
    monkeypatch.setattr(diagnosis.metadata, "entry_points", lambda group: [types.SimpleNamespace(name="ssdgram")])
    return {"SSDGRAM_STORE": str(engram.out), "SSDGRAM_DRAM": "64MiB"}


def verdicts(environment):
    return {finding.subject: finding for finding in diagnosis.examine_engine("vllm", environment)}


def test_active_where_everything_is_as_it_should_be(all_well):
    findings = verdicts(all_well)
    assert findings["plug-in"].verdict == OK and findings["plug-in"].found == "would be active in vLLM"
    assert "seams as published" in findings["vLLM"].found


@pytest.mark.parametrize(("change", "subject", "text"), [
    ({"SSDGRAM_STORE": ""}, "SSDGRAM_STORE", "not set"),
    ({"SSDGRAM_STORE": "/nowhere"}, "store", "/nowhere"),
    ({"SSDGRAM_DRAM": "much"}, "budgets", "much"),
    ({"SSDGRAM_DRAM": "900TiB"}, "budgets", "this machine has"),
    ({"SSDGRAM_SPEED": "1"}, "settings", "no such setting"),
    ({"SSDGRAM_SPLIT": "owner"}, "SSDGRAM_SPLIT", "set SSDGRAM_SPLIT=columns"),
    ({"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS", "other"),
    ({"VLLM_PLUGINS": ""}, "VLLM_PLUGINS", "empty"),
])
def test_what_is_wrong_has_a_line_and_is_in_the_verdict(all_well, change, subject, text):
    findings = verdicts({**all_well, **change})
    assert findings[subject].verdict == MISSING and text in findings[subject].found and findings[subject].advice
    assert findings["plug-in"].found.startswith("would not be active: ") and subject in findings["plug-in"].found


def test_ranks_that_divide_the_tables_are_told(all_well):
    findings = verdicts({**all_well, "SSDGRAM_SPLIT": "columns"})
    assert findings["SSDGRAM_SPLIT"].found.startswith("columns: each rank") and findings["plug-in"].verdict == OK


def test_ple_stores_are_told_by_their_encoding(all_well, ple):
    finding = verdicts({**all_well, "SSDGRAM_STORE": str(ple.out)})["store"]
    assert "ple" in finding.found and (finding.verdict == MISSING) == (ple.geometry.encoding == "nvfp4")


def test_a_servers_socket_takes_no_gpu_memory(all_well, tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        served = {**all_well, "SSDGRAM_STORE": str(tmp_path / "s")}
        found = verdicts(served)
        assert found["SSDGRAM_HBM"].verdict == OK and "the server's" in found["SSDGRAM_HBM"].found and found["plug-in"].verdict == OK
        for value, text in (("2GiB", "2GiB, with a server's socket"), ("much", "much")):
            found = verdicts({**served, "SSDGRAM_HBM": value})
            assert found["SSDGRAM_HBM"].verdict == MISSING and text in found["SSDGRAM_HBM"].found
            assert found["SSDGRAM_HBM"].advice.startswith("unset it") and "SSDGRAM_HBM" in found["plug-in"].found
        assert verdicts({**served, "SSDGRAM_HBM": "0MiB"})["plug-in"].verdict == OK


def test_an_allow_list_with_the_plug_in_is_right(all_well):
    assert verdicts({**all_well, "VLLM_PLUGINS": "a, ssdgram"})["plug-in"].verdict == OK


def test_an_engine_of_another_version_or_with_changed_files_is_told(all_well, monkeypatch):
    monkeypatch.setattr(seams, "installed", lambda package: ("0.34.0", "/nowhere"))
    assert "found 0.34.0" in verdicts(all_well)["vLLM"].found
    monkeypatch.setattr(seams, "installed", lambda package: (VLLM.version, "/nowhere"))
    monkeypatch.setattr(seams, "differences", lambda engine, folder: ["a.py: f is gone"])
    assert "a.py: f is gone" in verdicts(all_well)["vLLM"].found


def test_the_command_prints_the_verdict_and_fails_when_strict():
    answer = CliRunner().invoke(main, ["doctor", "--engine", "sglang", "--json", "--strict"])
    assert answer.exit_code == 1
    assert json.loads(answer.output)[-1]["found"].startswith("would not be active: SGLang")
