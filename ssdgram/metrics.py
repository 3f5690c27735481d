"""A Prometheus endpoint over a store's statistics: off until asked for, and on the loopback address unless told otherwise.

    with ssdgram.metrics.serve(store, port=9400) as endpoint: ...        # then GET http://127.0.0.1:9400/metrics

Nothing is counted here: every scrape calls `store.stats()` once and translates what it says, so the serving path never
sees this module. It knows the names of the statistics' attributes and no more of the store. A closed store answers with
its state alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ssdgram.errors import StoreClosedError, UnavailableError

STATES = ("loading", "warming", "ready", "degraded", "closed")


class Statistics(Protocol):
    """What this module reads of `store.stats()`. Counters only grow; orders are 2, 3, 4; tiers are "dram", "hbm", ..."""

    reads: int                                               # completed page reads
    bytes_read: int                                          # bytes that these brought
    bytes_served: int                                        # bytes of the rows that were handed out
    hits: Mapping[tuple[str, int], int]                      # (tier, order) -> bundles found there
    misses: Mapping[int, int]                                # order -> bundles that had to be read
    wait_us_buckets: Mapping[float, int]                     # upper bound in microseconds -> waits in this bucket alone
    wait_us_sum: float
    queue_depth: int                                         # reads in the drive
    oldest_ticket: int | None
    oldest_ticket_age_s: float
    state: str                                               # one of STATES
    budgets: Mapping[str, tuple[int, int]]                   # tier -> (bytes in use, bytes allowed)


class HasStatistics(Protocol):
    """A store, as far as this module cares."""

    def stats(self) -> Any: ...


class StoreCollector(Collector):
    """Translates one store's statistics at each scrape; register it with any prometheus_client registry, one store each."""

    def __init__(self, store: HasStatistics) -> None:
        self._store = store

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not ask the store in order to register the collector."""
        return ()

    def collect(self) -> Iterator[Metric]:
        try:
            statistics: Statistics = self._store.stats()
        except StoreClosedError:
            yield _states("closed")
            return
        yield _states(statistics.state)
        yield CounterMetricFamily("ssdgram_reads", "Completed page reads.", statistics.reads)
        yield CounterMetricFamily("ssdgram_read_bytes", "Bytes that came from the drives.", statistics.bytes_read)
        yield CounterMetricFamily("ssdgram_served_bytes", "Bytes of the rows that were handed out.", statistics.bytes_served)
        hits = CounterMetricFamily("ssdgram_hits", "Bundles found in a tier.", labels=("tier", "order"))
        for (tier, order), count in sorted(statistics.hits.items()):
            hits.add_metric((tier, str(order)), count)
        yield hits
        misses = CounterMetricFamily("ssdgram_misses", "Bundles that had to be read.", labels=("order",))
        for order, count in sorted(statistics.misses.items()):
            misses.add_metric((str(order),), count)
        yield misses
        yield _waits(statistics)
        yield GaugeMetricFamily("ssdgram_queue_depth", "Page reads in the drives.", statistics.queue_depth)
        if statistics.oldest_ticket is not None:
            yield GaugeMetricFamily("ssdgram_oldest_ticket", "The oldest batch that is not complete.", statistics.oldest_ticket)
        yield GaugeMetricFamily("ssdgram_oldest_ticket_age_seconds", "Its age; 0 without one.", statistics.oldest_ticket_age_s)
        used = GaugeMetricFamily("ssdgram_used_bytes", "Bytes in use of a tier's budget.", labels=("tier",))
        budget = GaugeMetricFamily("ssdgram_budget_bytes", "Bytes that a tier may use.", labels=("tier",))
        for tier, (in_use, allowed) in sorted(statistics.budgets.items()):
            used.add_metric((tier,), in_use)
            budget.add_metric((tier,), allowed)
        yield used
        yield budget


def _states(state: str) -> Metric:
    family = GaugeMetricFamily("ssdgram_state", "1 for the state that the store is in.", labels=("state",))
    for name in STATES:
        family.add_metric((name,), int(name == state))
    return family


def _waits(statistics: Statistics) -> Metric:
    """The histogram of lookup waits, in seconds as Prometheus wants it, cumulative as its format wants it."""
    total, buckets = 0, []
    for bound_us, count in sorted(statistics.wait_us_buckets.items()):
        total += count
        if bound_us != float("inf"):
            buckets.append((f"{bound_us / 1e6:.9g}", total))
    buckets.append(("+Inf", total))
    return HistogramMetricFamily("ssdgram_lookup_wait_seconds", "What callers waited for rows.", buckets=buckets,
                                 sum_value=statistics.wait_us_sum / 1e6)


class Endpoint:
    """A running metrics endpoint; close it, or use it as a context manager."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread

    @property
    def port(self) -> int:
        """The port that it listens on (the one that was found free, if 0 was asked for)."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop answering and free the port. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def serve(store: HasStatistics, *, port: int = 9400, address: str = "127.0.0.1") -> Endpoint:
    """Answer GET /metrics with the statistics of `store` until the endpoint is closed. Port 0: one that is free.

    Raises UnavailableError if the port cannot be had. The store must be closed after the endpoint, or before; a scrape of
    a closed store says so.
    """
    registry = CollectorRegistry()
    registry.register(StoreCollector(store))
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        raise UnavailableError(f"the metrics endpoint cannot listen on {address}:{port} ({error.strerror}): "
                               f"choose another port, or 0 for a free one") from error
    return Endpoint(server, thread)
