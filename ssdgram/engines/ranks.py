"""The ranks of a tensor-parallel group that share no memory: what each one holds of the tables, and that all serve the same rows.

    none       every rank gives all rows by itself, from a store or a server of its node: nothing to put together (the default)
    columns    a rank reads and keeps its columns, as the engine would shard the table; the engine gathers the ranks' columns
    owner      a rank reads and keeps the bundles whose hash falls to it, and gives zeros for the others; the engine adds up

Which of the two it can be is decided by the collective that the engine itself has for the table (SPLITS). A group is known by
`rank_in_group`, `world_size` and `cpu_group`, as both engines call them. Invariant: before a step is served, every rank of a
group knows that all of them opened one conversion and split it in one way.
"""

from __future__ import annotations

import socket
from typing import Any

from ssdgram.engines import opening
from ssdgram.engines.settings import Settings
from ssdgram.errors import ConfigError
from ssdgram.geometry import ENGRAM, PLE
from ssdgram.store import Store

SPLITS = {("vllm", ENGRAM): ("columns", "vLLM gathers whole columns of these tables over its ranks and adds nothing up"),
          ("vllm", PLE): ("owner", "vLLM adds up the rows of a PLE table over its ranks and gathers no columns"),
          ("sglang", ENGRAM): ("owner", "SGLang adds up the rows of these tables over its ranks and gathers no columns"),
          ("sglang", PLE): ("owner", "SGLang adds up the rows of a PLE table over its ranks and gathers no columns")}


def is_split(settings: Settings, engine: str, family: str) -> bool:
    """Whether the ranks of a group divide these tables of an engine among them.

    ConfigError for a way that the engine's own collective cannot put together, and for a server, which has whole bundles.
    """
    if settings.split == "none":
        return False
    possible, why = SPLITS[engine, family]
    opening.refuse(opening.is_socket(settings.store),
                   f"SSDGRAM_SPLIT={settings.split} with the server at {settings.store}: a server gives whole bundles to every rank of "
                   f"its node, so there is nothing to split: unset SSDGRAM_SPLIT, or let SSDGRAM_STORE be the store's folder")
    opening.refuse(settings.split != possible, f"SSDGRAM_SPLIT={settings.split}: {why}: set SSDGRAM_SPLIT={possible}, or unset it: every "
                                               f"rank then has all rows")
    return True


def owner_of(group: Any) -> dict[str, Any]:
    """What a rank that owns bundles is opened with."""
    return {"owner": (int(group.rank_in_group), int(group.world_size))}


def open_store(settings: Settings, group: Any, **options: Any) -> Store:
    """As opening.open_store with these options, but by every rank of the group, or by none of them; collective. None: no group.

    Raises what that raises on the rank whose store cannot be opened, whatever that is, and ConfigError on the others; on all of them
    if they would not serve the same rows.
    """
    if group is None:
        return opening.open_store(settings, **options)
    try:
        store = opening.open_store(settings, **options)
    except Exception as error:                               # torch's too (no GPU memory): the others wait to hear of it
        exchange(group, f"{type(error).__name__}: {error}")
        raise
    try:
        agree(exchange(group, f"SSDGRAM_SPLIT={settings.split}, generation {store.manifest.generation:016x}"))
    except BaseException:
        store.close()
        raise
    return store


def exchange(group: Any, what: str) -> list[tuple[str, str]]:
    """(host, what) of every rank of the group, by rank, over its CPU group; collective."""
    from torch import distributed

    said: list[Any] = [None] * int(group.world_size)
    distributed.all_gather_object(said, (socket.gethostname(), what), group=group.cpu_group)
    return said


def agree(said: list[tuple[str, str]]) -> None:
    """ConfigError unless all ranks said the same."""
    if len({what for _, what in said}) > 1:
        found = "; ".join(f"rank {number} on {host}: {what}" for number, (host, what) in enumerate(said))
        raise ConfigError(f"the {len(said)} ranks of this tensor-parallel group would not serve the same rows. Found {found}. Expected "
                          f"one conversion and one SSDGRAM_SPLIT on all of them: give every node the same SSDGRAM_* variables and a copy "
                          f"of the same store, or an `ssdgram serve` of it, and start again")
