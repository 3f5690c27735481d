"""The Prometheus endpoint: what a scrape says, that it listens on loopback alone, and how it ends."""

import socket
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import ssdgram
from ssdgram import metrics
from ssdgram.errors import StoreClosedError, UnavailableError

TOKENIZER = Path(__file__).parent / "golden/tiny_v41/tokenizer.json"


class FakeStore:
    """A store whose statistics are given."""

    def __init__(self, **changes):
        self.statistics = SimpleNamespace(**{
            "reads": 12, "bytes_read": 12 * 4096, "bytes_served": 48 * 264,
            "hits": {("dram", 2): 5, ("hbm", 3): 7}, "misses": {2: 1, 3: 2, 4: 3},
            "wait_us_buckets": {50.0: 3, 100.0: 0, 1e6: 2, float("inf"): 1}, "wait_us_sum": 2_500_000.0,
            "queue_depth": 9, "oldest_ticket": 41, "oldest_ticket_age_s": 0.25, "state": "ready",
            "budgets": {"dram": (100, 1 << 30)}, **changes})

    def stats(self):
        if self.statistics.state == "closed":
            raise StoreClosedError("the store is closed")
        return self.statistics


def samples(text):
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples}


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return samples(answer.read().decode())


def test_every_figure_arrives():
    with metrics.serve(FakeStore(), port=0) as endpoint:
        found = scrape(endpoint.port)
    assert found["ssdgram_reads_total", ()] == 12
    assert found["ssdgram_read_bytes_total", ()] == 12 * 4096
    assert found["ssdgram_served_bytes_total", ()] == 48 * 264
    assert found["ssdgram_hits_total", (("order", "2"), ("tier", "dram"))] == 5
    assert found["ssdgram_hits_total", (("order", "3"), ("tier", "hbm"))] == 7
    assert [found["ssdgram_misses_total", (("order", order),)] for order in "234"] == [1, 2, 3]
    assert found["ssdgram_queue_depth", ()] == 9
    assert found["ssdgram_oldest_ticket", ()] == 41
    assert found["ssdgram_oldest_ticket_age_seconds", ()] == 0.25
    assert found["ssdgram_used_bytes", (("tier", "dram"),)] == 100
    assert found["ssdgram_budget_bytes", (("tier", "dram"),)] == 1 << 30


def test_the_wait_histogram_is_cumulative_and_in_seconds():
    registry = CollectorRegistry()
    registry.register(metrics.StoreCollector(FakeStore()))
    found = samples(generate_latest(registry).decode())
    buckets = {float(dict(labels)["le"]): value for (name, labels), value in found.items() if name.endswith("_bucket")}
    assert buckets == {5e-05: 3, 1e-04: 3, 1.0: 5, float("inf"): 6}
    assert found["ssdgram_lookup_wait_seconds_count", ()] == 6
    assert found["ssdgram_lookup_wait_seconds_sum", ()] == 2.5


@pytest.mark.parametrize("state", metrics.STATES)
def test_exactly_one_state_is_set(state):
    registry = CollectorRegistry()
    registry.register(metrics.StoreCollector(FakeStore(state=state)))
    found = samples(generate_latest(registry).decode())
    states = {dict(labels)["state"]: value for (name, labels), value in found.items() if name == "ssdgram_state"}
    assert states == {name: float(name == state) for name in metrics.STATES}
    assert (("ssdgram_reads_total", ()) in found) == (state != "closed")


def test_no_ticket_is_no_sample():
    registry = CollectorRegistry()
    registry.register(metrics.StoreCollector(FakeStore(oldest_ticket=None, oldest_ticket_age_s=0.0)))
    found = samples(generate_latest(registry).decode())
    assert ("ssdgram_oldest_ticket", ()) not in found
    assert found["ssdgram_oldest_ticket_age_seconds", ()] == 0


@pytest.mark.parametrize("close_first", [False, True])
def test_a_real_store(tmp_path, close_first):
    ssdgram.synthesize(tmp_path / "checkpoint", vocab_size=211, tokenizer=TOKENIZER, hidden_size=64)
    ssdgram.convert(tmp_path / "checkpoint", tmp_path / "store")
    store = ssdgram.open(tmp_path / "store", dram="32MiB")
    with metrics.serve(store, port=0) as endpoint, store.prefetch([3, 4, 5]) as batch:
        batch.wait()
        statistics = store.stats()
        if close_first:
            store.close()
        found = scrape(endpoint.port)
    store.close()
    if close_first:
        assert found["ssdgram_state", (("state", "closed"),)] == 1 and ("ssdgram_reads_total", ()) not in found
        return
    assert found["ssdgram_state", (("state", "ready"),)] == 1
    assert found["ssdgram_reads_total", ()] == statistics.reads > 0
    assert found["ssdgram_oldest_ticket", ()] == batch.ticket
    assert found["ssdgram_lookup_wait_seconds_count", ()] == sum(statistics.wait_us_buckets.values()) >= 2
    assert found["ssdgram_budget_bytes", (("tier", "dram"),)] == 32 << 20
    misses = sum(value for (name, _), value in found.items() if name == "ssdgram_misses_total")
    assert misses == sum(statistics.misses.values()) > 0


def test_it_listens_on_loopback_and_frees_the_port():
    endpoint = metrics.serve(FakeStore(), port=0)
    assert endpoint._server.server_address[0] == "127.0.0.1"
    port = endpoint.port
    endpoint.close()
    endpoint.close()
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_a_taken_port_is_refused_with_advice():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UnavailableError, match="choose another port"):
            metrics.serve(FakeStore(), port=taken.getsockname()[1])
