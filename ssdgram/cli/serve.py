"""`ssdgram serve`: owns a store and lets the other processes of this machine attach to it, until it is told to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket as sockets
import threading
from pathlib import Path

import click


@click.command()
@click.argument("store", type=click.Path(path_type=Path, file_okay=False))
@click.option("--socket", "path", required=True, type=click.Path(path_type=Path, dir_okay=False),
              help="Where clients attach: ssdgram.attach(PATH). Made with mode 0600; one that a dead server left is replaced.")
@click.option("--dram", default="1GiB", show_default=True, help="Memory of the one cache, everything included.")
@click.option("--hotset", type=click.Path(path_type=Path, dir_okay=False),
              help="A file outside the store: read at the start if it is there, written at the end, so that a restart is warm.")
@click.option("--queue", default="auto", show_default=True, type=click.Choice(["auto", "uring", "threads"]), help="How pages are read.")
@click.option("--stripe", "stripes", multiple=True, type=click.Path(path_type=Path, file_okay=False),
              help="Where the stripes are now, in their order, if they moved.")
@click.option("--layer", "layers", multiple=True, type=int, help="Serve this decoder layer only; may be given several times.")
@click.option("--clients", type=click.IntRange(1, 1024), default=16, show_default=True, help="Most processes attached at once.")
@click.option("--batches", type=click.IntRange(1, 1024), default=64, show_default=True, help="Most unreleased batches of a client.")
@click.option("--batch-tokens", type=click.IntRange(1, 1 << 22), default=65536, show_default=True, help="Most tokens of a batch.")
@click.option("--readers", type=click.IntRange(1, 256), help="Reader threads; default: by queue and processors.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Answer Prometheus on this port of the loopback address.")
def serve(store: Path, path: Path, dram: str, hotset: Path | None, queue: str, stripes: tuple[Path, ...], layers: tuple[int, ...],
          clients: int, batches: int, batch_tokens: int, readers: int | None, metrics_port: int | None) -> None:
    """Own STORE for all processes of this machine: one cache, one set of readers, each row read once for all of them.

    Prints a line when clients can attach, then runs until SIGTERM or SIGINT. Under systemd: Type=notify.
    """
    from ssdgram.serve.server import Server
    from ssdgram.store import Tuning

    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server(store, path, dram=dram, hotset=hotset, queue=queue, stripes=stripes or None,
                                            layers=layers or None, clients=clients, rows=batches, positions=batch_tokens,
                                            tuning=Tuning(readers=readers)))
        if metrics_port is not None:
            from ssdgram.metrics import serve as serve_metrics

            endpoint = stack.enter_context(serve_metrics(server.store, port=metrics_port))
            click.echo(f"metrics at http://127.0.0.1:{endpoint.port}/metrics")
        click.echo(f"serving {store} at {path}: {dram} of memory, {server.store.capacity} bundles, queue {server.store.queue}")
        _notify("READY=1")
        stopped.wait()
        _notify("STOPPING=1")
    click.echo("stopped")


def _notify(state: str) -> None:
    """Tell systemd, if it started us and wants to know (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with contextlib.suppress(OSError), sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM | sockets.SOCK_CLOEXEC) as connection:
            connection.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
