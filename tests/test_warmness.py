"""bench warmness in miniature: what is refused, what is equal, what is written. No times are judged."""

import copy
import json
import mmap
import os
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from ssdgram.bench.material import Material, make
from ssdgram.bench.warmness import bars, cells, compare, document, meter, report, sizes, stand_in, states, steps, text
from ssdgram.bench.warmness import run as run_module
from ssdgram.bench.warmness.placements import Ssdgram
from ssdgram.bench.warmness.run import Options, run
from ssdgram.cli import main
from ssdgram.errors import ConfigError
from ssdgram.kernels.hash import OUTPUT
from ssdgram.layout.files import load_token_map
from ssdgram.layout.manifest import Manifest
from ssdgram.tools.text import Document
from ssdgram.tools.trace import Trace
from ssdgram.tools.trace_build import build

SMALL = sizes.Sizes("test", rows=1_000, trace_tokens=2_048, warm_tokens=512, decode=(1, 8), prefill=(64,), budget_s=0.05, longest_s=60,
                    step_batches=(8,), step_count=2, prompt=64, limit_s=1000)
WORDS = ["for", "each", "row", "of", "the", "table", "in", "turn", "a", "reader", "says", "where", "it", "lies", "and", "which", "page"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(Material(tmp_path_factory.mktemp("warmness"), 1_000))


@pytest.fixture(scope="module")
def trace(made):
    random = np.random.default_rng(0)
    numbers = [str(n) for n in random.integers(0, 10_000, 400)]
    words = [[random.choice(WORDS + numbers) for _ in range(600)] for _ in range(4)]
    return build(made.tokenizer, [Document(f"test/{k}", " ".join(chosen)) for k, chosen in enumerate(words)], 2_048)


@pytest.fixture(scope="module")
def cut(made, trace):
    manifest = Manifest.load(made.out)
    return text.Text(trace, manifest.geometry, load_token_map(made.out, manifest))


@pytest.fixture(scope="module")
def result(made, trace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trace.save(folder / "text.trace")
    options = Options(folder=folder / "work", sizes=SMALL, store=made.out, checkpoint=made.checkpoint, trace=folder / "text.trace",
                      dram=64 << 20)
    lines = []
    found = run(options, say=lines.append)
    assert not list((folder / "work").iterdir())             # hot sets are gone
    return found


# ---------------------------------------------------------------- the text


def test_filler_is_refused_unless_forced_and_then_labelled(made, trace):
    manifest = Manifest.load(made.out)
    token_map = load_token_map(made.out, manifest)
    once = trace.tokens[:500]
    for tokens in (np.tile(once, 4), np.full(2_000, 7, np.int32)):
        filler = Trace.of_documents(tokens.astype(np.int32), np.array([0, len(tokens)]), {})
        with pytest.raises(ConfigError, match="filler, not text"):
            text.Text(filler, manifest.geometry, token_map)
        assert text.Text(filler, manifest.geometry, token_map, force_filler=True).filler


def test_real_text_is_no_filler(cut):
    assert not cut.filler and cut.repeated < 0.1


def test_repeated_share_counts_windows_seen_before():
    tokens = np.arange(200, dtype=np.int32)
    assert text.repeated_share(tokens) == 0
    doubled = np.concatenate([tokens, tokens])
    assert text.repeated_share(doubled) == pytest.approx(185 / 385)
    assert text.repeated_share(tokens[:20]) == 0


def test_a_step_has_the_ids_of_its_positions_in_their_documents(cut, trace):
    boundary = int(trace.starts[1])
    for spans in ([(5, 9)], [(boundary - 2, boundary + 3)], [(7, 8), (boundary, boundary + 1), (boundary + 2, boundary + 3)]):
        step = cut.step(spans)
        wanted = []
        for start, stop in spans:
            for position in range(start, stop):
                first = int(trace.starts[np.searchsorted(trace.starts, position, side="right") - 1])
                lookback = trace.tokens[max(first, position - 3):position]
                wanted.append(cut.geometry.row_ids(trace.tokens[position:position + 1], cut.token_map, lookback=lookback)[0])
        assert len(step) == len(wanted)
        for layer, ids in enumerate(step.ids):
            np.testing.assert_array_equal(ids, np.array(wanted)[:, layer])


def test_decode_steps_walk_streams_of_their_own_and_never_repeat_a_position(cut):
    found = cut.decode((0, 512), 8, 1_000)
    places = [span for step in found for span in step.spans]
    assert len(found) == 64 and len(set(places)) == len(places) == 512
    assert [step.spans[3] for step in found[:2]] == [(192, 193), (193, 194)]


def test_never_seen_positions_share_no_bundle_with_each_other_or_with_what_is_known(cut):
    positions = cut.never_seen((1_024, 2_048), (0, 512))
    known = {tuple(row) for row in cut.step([(0, 512)]).ids[0][:, :8]}
    rows = [tuple(row) for row in cut.step([(int(p), int(p) + 1) for p in positions]).ids[0][:, :8]]
    assert len(set(rows)) == len(rows) > 50 and not known & set(rows)


# ---------------------------------------------------------------- figures


def test_percentiles_of_known_values():
    found = meter.percentiles(range(1, 102))
    assert found == {"p50": 51, "p90": 91, "p99": 100, "max": 101, "mean": 51}


def test_counters_see_processor_time_and_faults():
    before = meter.counters()
    with mmap.mmap(-1, 1 << 21) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for place in range(0, 1 << 21, mmap.PAGESIZE):
            memory[place] = 1
    while meter.counters().cpu_s - before.cpu_s < 0.02:
        pass
    spent = meter.counters() - before
    assert spent.cpu_s >= 0.02 and spent.minor_faults >= (1 << 21) // mmap.PAGESIZE
    assert (spent + spent).minor_faults == 2 * spent.minor_faults


def test_cached_bytes_counts_what_the_kernel_holds(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 16))
    assert meter.cached_bytes([path, path]) == 2 << 16


def test_two_passes_whose_medians_differ_are_unstable(cut):
    matrix = object.__new__(cells.Matrix)
    matrix.text, matrix.placements = cut, {"x": cells.Placement(cut.geometry, None)}
    row, step = cells.Row("warm", "decode", 1), cut.step([(4, 5)])
    for second, stable in ((109.0, True), (111.0, False)):
        turns = [cells.Turn(times_us=[us] * 3, stalls_us=[us] * 3, done=[step] * 3,
                            accounts=[{"hit_rate": {}, "reads": 2, "bytes_read": 8192}]) for us in (100.0, second)]
        cell = matrix._cell("x", row, turns)
        assert cell["stable"] is stable and cell["medians_us"] == [100.0, second] and cell["lookups"] == 6
        assert cell["reads"] == pytest.approx(4 / 6) and cell["bytes_per_useful_byte"] == pytest.approx(16384 / 6 / (48 * 264))
    turns[1].status, turns[1].why = "failed", "a reason"
    assert matrix._cell("x", row, turns) == {"placement": "x", "warmness": "warm", "kind": "decode", "tokens": 1, "status": "failed",
                                             "why": "a reason"}


@pytest.mark.parametrize("drive_bytes, cached, refused", [(1 << 17, 1.0, False), (1 << 17, 0.9, True), (0, 0.9, False)])
def test_a_page_of_a_library_read_meanwhile_does_not_make_a_warm_cell_cold(cut, monkeypatch, drive_bytes, cached, refused):
    """The kernel counts the bytes that the process had read, of whatever file; a small cell asks for hardly more than such a page."""
    matrix = object.__new__(cells.Matrix)
    placement = cells.Placement(cut.geometry, None)
    monkeypatch.setattr(placement, "files", lambda: ["a file"])
    matrix.text, matrix._rates, matrix._share = cut, {}, lambda name, placement: cached
    turn = cells.Turn(times_us=[100.0], done=[cut.step([(4, 12)])], accounts=[{}], cached_before=1.0,
                      spent=meter.Counters(drive_bytes=drive_bytes))
    matrix._finish(cells.Row("warm", "decode", 8), "x", placement, turn)
    assert (turn.status == "refused") is refused and ("came from the drive" in turn.why) is refused


def test_the_drive_that_steady_text_needs():
    # 1000 reads a step, 500 for the first layer in one layer's 1 ms: 0.5 ms of exposure leave it 1.5 ms
    assert steps.drive_rate(1000, 0.0, 1e-3, 0.5e-3) == pytest.approx(500 / 1.5e-3, rel=0.01)
    # plenty of time for the first layer: the second layer's 14 ms decide
    assert steps.drive_rate(1000, 0.0, 1e-3, 1.0) == pytest.approx(1000 / 1.014, rel=0.01)
    assert steps.drive_rate(1000, 2e-3, 1e-3, 0.5e-3) is None and steps.drive_rate(1000, 0.0, 1e-3, -1e-6) is None


def test_layer_times_between_the_tables_entries():
    assert stand_in.decode_us(64) == 250 and stand_in.decode_us(40) == 215 and stand_in.decode_us(1000) == 400
    assert stand_in.decode_us(7, {4: 100.0}) == 100


class Clock:
    """A clock that only sleeping moves."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_the_imagined_device_runs_what_is_launched_and_waits_for_what_is_not(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stand_in, "time", clock)
    compute = stand_in.Sleeping(1_000)
    compute.begin()
    compute.run(3)
    clock.now += 1e-3                                        # the caller does something else meanwhile
    compute.run(1)
    assert compute.finish() == pytest.approx(4e-3)
    clock.now += 1e-2                                        # the device idles
    compute.run(1)
    assert compute.finish() == pytest.approx(4e-3 + 1e-2 + 1e-3)

    class Slow:
        on_host = True

        def begin(self, step):
            return "begun"

        def take(self, begun, step, layer):
            clock.sleep(2e-3)

        def fetch(self, begun, step, layer):
            clock.sleep(2e-3)

        def end(self, begun):
            assert begun == "begun"

    assert steps.one_step(None, None, compute, True) == pytest.approx(40e-3)
    assert steps.one_step(Slow(), None, compute, False) == pytest.approx(44e-3)           # both fetches stick out
    assert steps.one_step(Slow(), None, compute, True) == pytest.approx(41e-3)            # one layer hides half of the first, 13 the second


# ---------------------------------------------------------------- a run


def test_every_cpu_placement_is_measured_and_the_others_are_said_not_to_be(result):
    assert result["checked"] == {"ssdgram": "equal", "dram-copy": "equal", "ssd-mmap": "equal", "ssd-pread": "equal"}
    assert set(result["not_run"]) == {"hbm", "dram-uva", "ssdgram-hbm"}
    assert all("GPU" in entry["why"] for entry in result["not_run"].values())
    measured = {(cell["placement"], cell["warmness"], cell["tokens"]) for cell in result["cells"] if cell["status"] == "ok"}
    for warmness in sizes.WARMNESS:
        batches = (8, 64) if warmness == "mixed" else (1, 8, 64)                 # one position has no halves
        assert {("ssdgram", warmness, tokens) for tokens in batches} <= measured, [c for c in result["cells"] if c["status"] != "ok"]
    lost = {(cell["placement"], cell["warmness"], cell["tokens"]) for cell in result["cells"]
            if cell["status"] == "refused" and "too little memory to keep the files" in cell["why"]}         # other tests need it meanwhile
    assert {("ssd-mmap", "cold", 64), ("ssd-pread", "cold", 64), ("ssd-pread", "warm", 8), ("dram-copy", "steady", 64)} <= measured | lost
    assert {warmness for _, warmness, _ in lost} <= {"warm"}


def test_warm_and_cold_are_what_they_say(result):
    for cell in result["cells"]:
        if cell["placement"] != "ssdgram" or cell["status"] != "ok":
            continue
        if cell["warmness"] == "warm":
            assert cell["hit_rate_all"] == 1 and cell["reads"] == 0 and set(cell["hit_rate"]["dram"].values()) == {1.0}
        if cell["warmness"] == "cold":
            assert cell["hit_rate_all"] == 0 and cell["reads"] > 0 and cell["cached_before"] <= cells.COLD_SHARE
        if cell["warmness"] == "mixed" and cell["kind"] == "decode" and cell["tokens"] == 8:
            assert 0.3 < cell["hit_rate_all"] < 0.6          # half of the positions, less what a step asks for twice
        assert set(meter.PERCENTILES) < set(cell["lookup_us"]) and cell["cpu_s"] > 0 and cell["rss"] > 0


def test_the_step_model_has_every_state_and_a_window(result):
    rows = {(row["placement"], row["warmness"], row["kind"], row["prefetch"]): row for row in result["step"]["rows"]}
    for warmness in sizes.WARMNESS:
        row = rows["ssdgram", warmness, "decode", True]
        assert row["status"] == "ok" and 0 < row["tokens_s"] <= 8 / (40 * stand_in.decode_us(8) / 1e6) * 1.001
        assert ("ssdgram", warmness, "decode", False) in rows or warmness in ("cold", "mixed")
    assert 0 <= rows["ssdgram", "warm", "decode", False]["window_layers"]["p50"]
    assert rows["none", "warm", "decode", True]["step_ms"]["p50"] == pytest.approx(40 * stand_in.decode_us(8) / 1e3, rel=0.05)
    assert result["step"]["asked_layer_us"] == {"1": 150.0, "16": 180.0, "64": 250.0, "256": 400.0}


def test_a_file_system_in_memory_is_not_cold(made, cut, tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "cached_bytes", lambda paths: sum(path.stat().st_size for path in paths) // 50)
    options = Options(folder=tmp_path / "work", sizes=SMALL, store=made.out, checkpoint=made.checkpoint, trace=tmp_path / "t",
                      dram=64 << 20, placements=("ssd-pread", "ssdgram"), warmness=("cold",), step=False)
    cut.trace.save(tmp_path / "t")
    found = run(options, say=lambda line: None)
    assert {cell["status"] for cell in found["cells"]} == {"refused"}
    assert all("2.0% of the files are in the page cache, which is not cold" in cell["why"] for cell in found["cells"])


def test_a_placement_that_fails_says_so_and_the_others_go_on(made, cut, tmp_path, monkeypatch):
    def broken(self, step, layer):
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr("ssdgram.bench.warmness.placements.SsdPread._read", lambda *arguments: broken(*arguments[:3]))
    cut.trace.save(tmp_path / "t")
    options = Options(folder=tmp_path / "work", sizes=SMALL, store=made.out, trace=tmp_path / "t", dram=64 << 20,
                      placements=("ssd-mmap", "ssd-pread", "ssdgram"), warmness=("warm",), step=False)
    found = run(options, say=lambda line: None)
    assert "give --checkpoint" in found["not_run"]["ssd-mmap"]["why"]
    assert found["not_run"]["ssd-pread"] == {"status": "failed", "why": "ZeroDivisionError: of all things"}
    assert {cell["status"] for cell in found["cells"] if cell["placement"] == "ssdgram"} == {"ok"}


class Hot(Ssdgram):
    """What ssdgram-hbm is on a GPU: a second store, in warm states alone."""

    name, states, heated = "ssdgram-hbm", ("warm",), True


def run_with(monkeypatch, made, cut, folder, second, **wanted):
    original = run_module._placements

    def more(options, table, text_, hbm, stack):
        found, _ = original(options, table, text_, hbm, stack)
        found[second.name] = second(found["ssdgram"].geometry, found["ssdgram"].landing, table.paths)
        return found, {}

    monkeypatch.setattr(run_module, "_placements", more)
    cut.trace.save(folder / "t")
    options = Options(folder=folder / "work", sizes=SMALL, store=made.out, checkpoint=made.checkpoint, trace=folder / "t", dram=64 << 20,
                      placements=("ssdgram",), **wanted)
    return run(options, say=lambda line: None)


def test_two_stores_side_by_side_in_the_states_that_they_take_part_in(made, cut, tmp_path, monkeypatch):
    found = run_with(monkeypatch, made, cut, tmp_path, Hot, warmness=("cold", "warm"))
    states = {(cell["placement"], cell["warmness"]): cell["status"] for cell in found["cells"]}
    assert states == {("ssdgram", "cold"): "ok", ("ssdgram", "warm"): "ok", ("ssdgram-hbm", "warm"): "ok"}
    rows = {(row["placement"], row["warmness"]): row["status"] for row in found["step"]["rows"]}
    assert rows == {("none", "cold"): "ok", ("none", "warm"): "ok"} | states


def test_a_store_that_cannot_be_opened_does_not_lose_the_others(made, cut, tmp_path, monkeypatch):
    class Broken(Hot):
        hbm = 0

        def lookup(self, step):                              # after the rows were compared
            self.hbm = 1 << 20
            return super().lookup(step)

    found = run_with(monkeypatch, made, cut, tmp_path, Broken, warmness=("warm",))
    for row in [*found["cells"], *found["step"]["rows"]]:
        assert row["status"] == ("failed" if row["placement"] == "ssdgram-hbm" else "ok"), row
    assert {cell["why"] for cell in found["cells"] if cell["status"] == "failed"} == {
        "its store could not be opened: ConfigError: hbm=1048576 bytes with device='cpu': an HBM tier needs a CUDA device"}


def test_heating_ends_when_all_is_there_or_nothing_moves(cut, monkeypatch):
    def rounds_until(shares):
        asked, served = [], {("dram", 2): 0, ("hbm", 2): 0}

        class Store:
            def stats(self):
                return SimpleNamespace(hits=dict(served))

        def load(store, pieces):
            share = shares[min(len(asked), len(shares) - 1)]
            asked.append(sum(map(len, pieces)))
            served["hbm", 2] += round(100 * share)
            served["dram", 2] += round(100 * (1 - share))

        monkeypatch.setattr(states, "load", load)
        return states.States(None, None, cut, 0, "cuda").heat(Store(), (0, 512)), asked

    share, asked = rounds_until([0, 0, 0.5, 0.9, 1.0])
    assert share == 1 and asked == [512] * 5
    share, asked = rounds_until([0, 0, 0, 0, 0, 0, 0.5, 0.5])
    assert share == 0.5 and len(asked) == 7 + states.IDLE_ROUNDS
    assert len(rounds_until([0])[1]) == states.ROUNDS


# ---------------------------------------------------------------- what is written


class Resources(HTMLParser):
    """Every attribute of a page that could fetch something, and the tags that could."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        if tag in ("script", "link", "iframe", "object", "embed", "base"):
            self.found.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data", "action", "srcset", "poster") and not (value or "").startswith("#"):
                self.found.append((tag, name, value))


def test_the_report_needs_nothing_but_itself(result, tmp_path):
    pytest.importorskip("matplotlib")
    paths = {path.name for path in report.write(result, tmp_path)}
    assert {"report.json", "cells.csv", "steps.csv", "report.html", "latency.png", "throughput.png", "hit_rate.png", "tokens.png",
            "budget.png"} == paths
    page = (tmp_path / "report.html").read_text()
    resources = Resources()
    resources.feed(page)
    assert not resources.found and "@import" not in page and not re.search(r"url\((?!#)", page)
    assert page.count("<svg") == 5 and result["trace"]["digest"][:16] in page
    for name, value in result["facts"].items():
        assert name in page and str(value) in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert json.loads((tmp_path / "report.json").read_text())["cells"] == json.loads(json.dumps(result["cells"]))
    assert len((tmp_path / "cells.csv").read_text().splitlines()) == len(result["cells"]) + 1


def test_names_from_outside_are_escaped(result):
    from ssdgram.bench.warmness import html

    page = html.page({**result, "facts": {**result["facts"], "cpu": "<script>x</script>"}}, {})
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_bars_without_a_gpu_are_untested_not_met(result):
    found = {bar["what"]: bar for bar in bars.bars(result)}
    assert all(bar["ok"] is None for what, bar in found.items() if "hbm" in what or "dram-uva" in what)


def test_bars_compare_what_they_say():
    def cell(placement, warmness, rows_s):
        return {"status": "ok", "placement": placement, "warmness": warmness, "kind": "prefill", "tokens": 2048, "rows_s": rows_s,
                "lookup_us": {"p50": 1e6 / rows_s}, "stable": True}

    def loop(placement, prefetch, tokens_s):
        return {"status": "ok", "placement": placement, "warmness": "warm", "kind": "decode", "tokens": 64, "prefetch": prefetch,
                "tokens_s": 2 * tokens_s, "step_ms": {"p50": 64e3 / tokens_s}, "stable": False}

    made = {"cells": [cell("ssdgram", "cold", 500.0), cell("ssd-mmap", "cold", 100.0), cell("ssdgram", "warm", 999.0),
                      cell("ssd-mmap", "warm", 100.0), cell("ssdgram-hbm", "warm", 1000.0)],
            "step": {"rows": [loop("ssdgram", True, 98.9), loop("hbm", True, 100.0), loop("dram-uva", True, 98.9),
                              loop("dram-uva", False, 98.0), loop("dram-uva-frame", True, 108.95), loop("ssdgram-hbm", True, 99.0),
                              loop("ssdgram-hbm-frame", True, 109.01), loop("hbm-frame", True, 110.2)]},
            "budget": {"share": 0.125}}
    of_hbm, of_uva = [False, None, None], [False, True, None]                # begun ahead, in line, captured
    of_both = [*of_hbm, *of_uva, True, None, False, True, True, True]
    assert [bar["ok"] for bar in bars.bars(made)] == [True, False, True, *of_both, *[None] * 13]
    assert bars.bars(made)[9]["what"].startswith("warm ssdgram-hbm (begun ahead) over hbm (begun")
    assert bars.bars(made)[14]["what"].startswith("warm ssdgram-hbm-frame over dram-uva (captured)")
    starred = [bar["what"].endswith(" *") for bar in bars.bars(made)]          # cells are stable here, loops are not
    assert starred == [False] * 3 + [True] * 12 + [False] * 13
    made["budget"]["share"] = 0.2
    assert [bar["ok"] for bar in bars.bars(made)][3:] == [None] * 25


class Rows(SimpleNamespace):
    """A lookup over a whole table that notes what it is launched for."""

    def look_up(self, flat, length, count, layer):
        self.seen.append((layer, count, [part.tolist() for part in self.parts(flat, length)]))


def test_a_captured_lookup_is_of_the_step_that_it_is_run_for(cut):
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from ssdgram.bench.warmness import device

    steps = [cut.step([(3, 4), (9, 10)]), cut.step([(5, 6), (0, 1)])]        # the last looks back at less
    whole = Rows(name="hbm", geometry=cut.geometry, landing=None, seen=[], parts=device.parts, _device=torch.device("cpu"))
    frame = device.FramedRows(whole)
    assert frame.name == "hbm-frame"
    frame._make_room(steps)
    frame._warm_up()
    assert [layer for layer, _, _ in whole.seen] == list(range(len(cut.geometry.layers)))
    frame._graph = SimpleNamespace(replay=frame._warm_up)
    compute = SimpleNamespace(begin=lambda: None, run=lambda layers: None, finish=lambda: 1.5)
    for step in (steps[1], steps[0], steps[1]):
        whole.seen.clear()
        assert frame.whole_step(step, compute, 1) == 1.5
        tokens, flags = step.sequence.flat_tokens, step.sequence.flat_flags
        for _, count, (found, ranks, kinds) in whole.seen:
            assert count == 2 and found[:len(tokens)] == tokens.tolist() and kinds[:len(flags)] == flags.tolist()
            assert len(found) == len(ranks) == len(kinds) == max(len(step.sequence.flat_tokens) for step in steps)
            assert not any(kinds[len(flags):]) and ranks == np.cumsum((np.array(kinds) & OUTPUT) != 0).tolist() and ranks[-1] == 2


@pytest.mark.parametrize("count", (3, 27, 30))
def test_bytes_over_the_link_are_those_of_the_pieces_distinct_bundles(cut, monkeypatch, count):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from ssdgram import staging
    from ssdgram.bench.warmness import device
    from ssdgram.sequence import pieces

    monkeypatch.setattr(staging, "GRAPHS", (2, 5))
    monkeypatch.setattr(staging, "PIECES", (5, 8))
    monkeypatch.setattr(staging, "DISTINCT", 7)
    step = cut.step([(0, count)])
    ours = device.DeviceSsdgram.__new__(device.DeviceSsdgram)
    ours.geometry = geometry = cut.geometry
    ours.landing = SimpleNamespace(most=100)
    lengths = [len(part) for part in pieces(step.sequence, geometry.max_ngram, staging.PIECES)]
    bundles, start = 0, 0
    for length in lengths:
        for ids in step.ids:
            asked = [tuple(row[first:first + geometry.heads]) for row in ids[start:start + length].tolist()
                     for first in range(0, geometry.columns, geometry.heads)]
            bundles += len(set(asked)) if length > 5 else len(asked)         # by a graph of 8 positions
        start += length
    assert ours.pcie_bytes(step) == bundles * geometry.heads * geometry.row_bytes


def test_two_runs_beside_each_other(result, tmp_path):
    earlier, later = copy.deepcopy(result), copy.deepcopy(result)
    cells_of, rows_of = ([row for row in rows if row["status"] == "ok"] for rows in (later["cells"], later["step"]["rows"]))
    for row in cells_of + rows_of:
        row["stable"] = False
    cells_of[0]["lookup_us"]["p50"] *= 1.11
    rows_of[0]["step_ms"]["p50"] /= 1.11
    marked = compare.mark(later, earlier)
    assert [row for row in cells_of + rows_of if not row["stable"]] == [cells_of[0], rows_of[0]]
    assert marked["compared"]["cells"] - 2 == marked["compared"]["stable"] == len(cells_of + rows_of) - 2
    assert "two runs" in marked["bars"][-1]["what"] and marked["bars"][-1]["found"] < 1
    earlier["cells"] = []
    assert not any(row["stable"] for row in compare.mark(copy.deepcopy(result), earlier)["cells"] if row["status"] == "ok")
    earlier["trace"]["digest"] = "other"
    with pytest.raises(ConfigError, match="differ in trace digest"):
        compare.mark(later, earlier)


def test_the_command_marks_a_report_that_is_there(result, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(result))
    runner = CliRunner()
    done = runner.invoke(main, ["bench", "warmness", "--report", str(path), "--against", str(path), "--out", str(tmp_path / "again")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "again" / "report.json").read_text())
    assert found["compared"]["stable"] == found["compared"]["cells"] > 0 and f"{found['compared']['cells']} medians within" in done.output
    (tmp_path / "other.json").write_text("[]")
    done = runner.invoke(main, ["bench", "warmness", "--report", str(path), "--against", str(tmp_path / "other.json")])
    assert done.exit_code == 1 and "is no report" in done.output


def test_the_command_refuses_what_it_does_not_know():
    runner = CliRunner()
    for arguments, text_of_error in ((["--placement", "tape"], "tape: there are hbm"), (["--decode", "0"], "expected numbers from 1"),
                                     (["--layer-us", "64"], "expected STREAMS=MICROSECONDS")):
        done = runner.invoke(main, ["bench", "warmness", "--quick", *arguments])
        assert done.exit_code == 2 and text_of_error in done.output
    assert "warmness" in runner.invoke(main, ["bench", "--help"]).output


def test_the_page_is_filled_from_the_json_and_says_what_is_missing(result, tmp_path):
    (tmp_path / "there.json").write_text(json.dumps(result))
    marks = "".join(f"<!-- table {name} of {file}.json -->\nOUTDATED\n<!-- end -->\n"
                    for name in document.MAKERS for file in ("there", "gone"))
    page = document.fill(marks, tmp_path)
    assert "OUTDATED" not in page and page.count("*not run yet: gone.json*") == len(document.MAKERS)
    assert document.fill(page, tmp_path) == page             # again: the same
    measured = [cell for cell in result["cells"] if cell["placement"] == "ssdgram" and cell["tokens"] == 64 and cell["warmness"] == "warm"]
    assert f"{report.ms(measured[0]['lookup_us']['p90'])}" not in ("", "nan") and "| hbm " not in page
    for line in page.splitlines():
        assert not line.startswith("|") or line.endswith("|")


def test_the_documented_tables_exist():
    page = (document.Path(__file__).parent.parent / "docs/performance.md").read_text()
    names = {match.group(2) for match in document.MARK.finditer(page)}
    assert names == set(document.MAKERS)
