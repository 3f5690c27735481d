"""From settings to an open store for one rank of an engine, checked against the model that it is to serve.

A store of other tables would serve wrong rows without a word, so everything that decides a row id is compared: layers, primes,
offsets, multipliers, the token map, the width of a row. It knows what an engine calls these by its arguments only.
Invariant: a store that passed gives the engine's own row ids, hence its own rows.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import ssdgram
from ssdgram.engines.settings import Settings
from ssdgram.errors import ConfigError, IdentityError, ManifestError
from ssdgram.geometry import Geometry
from ssdgram.layout.files import load_token_map
from ssdgram.layout.manifest import Manifest
from ssdgram.store import Store, Tuning

log = logging.getLogger("ssdgram")


def check_layout(geometry: Geometry, *, layers: Sequence[int], primes: Any, offsets: Any, row_dim: int, family: str = "engram") -> None:
    """IdentityError unless the store has these layers with these primes and offsets [L, columns] and rows of that width."""
    if geometry.family != family:
        raise IdentityError(f"the store holds {geometry.family} tables, the model wants {family}: is SSDGRAM_STORE the right folder?")
    absent = [layer for layer in layers if layer not in geometry.layers]
    if absent:
        raise IdentityError(f"the store has layers {list(geometry.layers)}, the model has its tables at {list(layers)}: is SSDGRAM_STORE "
                            f"the store of this model?")
    chosen = [geometry.layers.index(layer) for layer in layers]
    for name, wanted, found in (("primes", primes, geometry.prime_array), ("offsets", offsets, geometry.offset_array)):
        wanted = np.asarray(wanted, np.int64).reshape(len(chosen), -1)
        if not np.array_equal(wanted, found[chosen]):
            raise IdentityError(f"the store's {name} are not the model's: it was converted from another model; convert this one")
    if geometry.row_dim != row_dim:
        raise IdentityError(f"the store's rows have {geometry.row_dim} values, the model's {row_dim}: convert this model")


def check_hash(store: Store, *, layers: Sequence[int], multipliers: Any, token_map: Any) -> None:
    """IdentityError unless multipliers [L, n] of these layers and token map [V] are the store's."""
    chosen = [store.geometry.layers.index(layer) for layer in layers]
    if not np.array_equal(np.asarray(multipliers, np.int64), store.geometry.multiplier_array[chosen]):
        raise IdentityError("the store's hash multipliers are not the model's: it was converted from another model; convert this one")
    wanted, found = np.asarray(token_map, np.int64), _map_of(store)
    if len(wanted) != len(found) or not np.array_equal(wanted, found):
        raise IdentityError(f"the store's token map ({len(found)} ids) is not that of the engine's tokenizer ({len(wanted)} ids): the "
                            f"store was converted with another tokenizer; convert again with this model's tokenizer.json")


def _map_of(store: Store) -> np.ndarray:
    """The store's token map; that of a server's store is read from its folder."""
    found = getattr(store, "_token_map", None)
    if found is None:
        found = store.geometry.checked_map(load_token_map(store.path, Manifest.load(store.path)))
    return np.asarray(found)


def geometry_of(settings: Settings) -> Geometry | None:
    """The store's geometry before it is opened; None: it is a server's, and known once this process attached."""
    if is_socket(settings.store):
        return None
    try:
        return Manifest.load(settings.store).geometry
    except ManifestError as error:
        raise ManifestError(f"SSDGRAM_STORE on {socket.gethostname()}: {error}. Every node needs the store's folder, or the socket of an "
                            f"`ssdgram serve` that runs there") from error


def is_socket(path: str) -> bool:
    """Whether there is a socket: SSDGRAM_STORE is that of `ssdgram serve` then."""
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.stat(path).st_mode)
    return False


def open_store(settings: Settings, *, layers: Sequence[int], device: str, engine: str, rank: int = 0,
               tuning: Tuning | None = None, part: Mapping[str, Any] | None = None) -> Store:
    """Open the store for one rank (number on this node) of an engine, or attach to its server; its rows treat scale bytes as that engine
    does. `part`: the `columns` or `owner` of `ssdgram.open`, where ranks divide the tables (ranks.py)."""
    if is_socket(settings.store):
        with _default_device("cpu"):
            store: Store = ssdgram.attach(settings.store, device=device, hbm=settings.hbm, scale_rule=engine)
        if tuple(store.layers) != tuple(layers):
            store.close()
            raise ConfigError(f"the server at {settings.store} serves layers {list(store.layers)}, this rank has its tables at "
                              f"{list(layers)}: start a server for them")
        log.info("%s: serves layers %s to %s (rank %d) by its server at %s", store.path, list(store.layers), engine, rank, settings.store)
        return store
    hotset = settings.hotset if settings.hotset is None or rank == 0 else f"{settings.hotset}.{rank}"
    with _default_device("cpu"):                             # models are built, and their states made, under a default of their own
        store = ssdgram.open(settings.store, dram=settings.dram, hbm=settings.hbm, device=device, queue=settings.queue, layers=layers,
                             stripes=settings.stripes or None, hotset=hotset, scale_rule=engine, tuning=tuning, **(part or {}))
    log.info("%s: serves layers %s to %s (rank %d): %d bundles in %s of DRAM, %s of HBM, queue %s%s", store.path, list(store.layers),
             engine, rank, store.capacity, settings.dram, settings.hbm, store.queue,
             "".join(f", {name} {what}" for name, what in (part or {}).items()))
    return store


def _default_device(name: str) -> Any:
    import torch

    return torch.device(name)


def metrics_of(store: Store, settings: Settings, rank: int) -> Any:
    """The Prometheus endpoint of this rank, None if none is asked for."""
    if settings.metrics is None:
        return None
    from ssdgram import metrics

    endpoint = metrics.serve(store, port=settings.metrics + rank)
    log.info("%s: metrics at http://127.0.0.1:%d/metrics", store.path, endpoint.port)
    return endpoint


def refuse(condition: bool, text: str) -> None:
    """ConfigError with the text if the condition holds."""
    if condition:
        raise ConfigError(text)
