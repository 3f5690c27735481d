"""What the GPU's bench makes of its figures: no GPU is asked."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import ssdgram
from ssdgram.bench import gpu, gpu_store

RUN = json.loads((Path(__file__).parents[1] / "bench/results/gpu-gather.json").read_text())["gather"]


def test_the_committed_ratios_follow_from_the_committed_times():
    theirs = RUN["peer"]["us"]
    assert gpu.ratios(RUN["us"], theirs) == RUN["ratios"]
    best = gpu.at_best(theirs)
    assert all(least == min(theirs[f"pinned, {pages} pages{how}"][k] for pages in ("small", "huge") for how in ("", " sorted"))
               for k, least in enumerate(best))
    half = {"layers": 2, "us": {"staged": best}}
    assert gpu.share_of_peer(half, theirs) == {"staged / peer's lookups alone": [0.5] * len(gpu.TOKENS)}


def test_steps_are_those_of_a_store_of_its_own(monkeypatch, capsys):
    store, asked = SimpleNamespace(layers=(1, 14)), {}

    def end_to_end(given, rounds, sizes):
        assert given is store and rounds == 3
        return {str(count): {"staged_us": count + 0.5, "graph_us": 2.0 * count, "eager_us": 3.0 * count, "wrong_rows": count == 64}
                for count in sizes}

    @contextlib.contextmanager
    def opened(folder, **options):
        asked.update(folder=folder, **options)
        yield store

    monkeypatch.setattr(gpu_store, "end_to_end", end_to_end)
    monkeypatch.setattr(gpu_store, "build", lambda folder, rows: folder / f"{rows}")
    monkeypatch.setattr(ssdgram, "open", opened)
    found = gpu.steps_section(3)
    assert asked["folder"].name == str(gpu.STORE_ROWS) and asked["device"] == "cuda" and not asked["folder"].parent.exists()
    assert found["layers"] == 2 and found["wrong_rows"] == 1
    assert found["us"]["staged"] == [count + 0.5 for count in gpu.TOKENS] and found["us"]["eager"][-1] == 3 * 8192
    assert "host tokens to rows of 2 layers, us" in capsys.readouterr().out
