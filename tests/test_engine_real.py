"""The plug-in on vLLM's own classes, on a CPU, in processes of their own. `make test-engines` fetches what they need; skipped without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import TOKENIZER

import ssdgram

TESTS = Path(__file__).parent
FOLDER = Path(os.environ.get("SSDGRAM_TEST_ENGINES", TESTS.parent / ".peer/engines"))
pytestmark = [pytest.mark.engines, pytest.mark.slow,
              pytest.mark.skipif(not (FOLDER / "site.complete").exists(), reason="the packages are not there: make test-engines")]


def test_vllms_ple_classes_give_the_same_bits_with_the_plug_in(tmp_path):
    done = subprocess.run([sys.executable, str(TESTS / "engines_real_ple.py"), str(FOLDER), str(tmp_path)], capture_output=True, text=True,
                          timeout=280, env={**os.environ, "PYTHONPATH": str(TESTS.parent)})
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["wrong"] == 0
    for encoding in ("bf16", "fp8_global"):
        found = result[encoding]
        assert found["wrong"] == 0 and found["steps_of_each_mode"] == found["graph_steps"] == 30 and found["page_reads"] > 0
        assert found["rows_of_our_tables"] == 0


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """(checkpoint, store) of the real model's shape, with few rows."""
    folder = tmp_path_factory.mktemp("tables")
    checkpoint = ssdgram.synthesize(folder / "checkpoint", vocab_size=1000, seed=1, hidden_size=64, tokenizer=TOKENIZER)
    ssdgram.convert(checkpoint, folder / "store")
    return checkpoint, folder / "store"


@pytest.mark.timeout(600)
def test_vllms_engram_layers_with_tp_2_give_the_same_rows_from_one_server(tables):
    import tp2_on_cpu

    from ssdgram.bench import engines_tp2

    found = engines_tp2.identity(*tables, steps=12, timeout_s=240, work=tp2_on_cpu.vllm_work)
    assert found["not_as_wanted"] == {"outputs": 0, "bytes_read": 0, "held": 0}
    assert [rank["columns_of_the_stock_table"] for rank in found["two_ranks"]["ranks"]] == [[12, 12], [12, 12]]
    assert found["two_ranks"]["bytes_read"] > 0


@pytest.mark.timeout(300)
def test_vllms_engram_layers_with_tp_2_gather_the_columns_of_two_stores(tables):
    import tp2_on_cpu

    from ssdgram.bench import engines_tp2

    ranks = engines_tp2.measure(tp2_on_cpu.vllm_columns_work, *tables, world=2, steps=12, timeout_s=240)["ranks"]
    assert [rank["wrong"] for rank in ranks] == [0, 0] and all(rank["reads"] > 0 for rank in ranks)
    assert [rank["columns"] for rank in ranks] == [list(range(12)), list(range(12, 24))]
