"""Work of two ranks for test_engine_ranks.py, importable by the processes that it starts: on the CPU, over gloo."""

import datetime
import threading
from types import SimpleNamespace

import numpy as np


def work(rank, rendezvous, store, other):
    import torch
    from torch import distributed

    from ssdgram.engines import opening, ranks
    from ssdgram.engines.settings import Settings
    from ssdgram.errors import SSDGramError

    distributed.init_process_group("gloo", f"file://{rendezvous}", datetime.timedelta(seconds=240), 2, rank)
    group = SimpleNamespace(rank_in_group=rank, world_size=2, cpu_group=distributed.group.WORLD)
    options = {"layers": (1, 14), "device": "cpu", "engine": "sglang", "rank": rank}

    def settings(split="none", path=store):
        return Settings(store=path, dram="8MiB", queue="threads", split=split)

    # both ways against a whole store, the same steps
    share = 6
    stores = {"whole": opening.open_store(settings(), **options),
              "columns": ranks.open_store(settings("columns"), group, part={"columns": range(rank * share, (rank + 1) * share)}, **options),
              "owner": ranks.open_store(settings("owner"), group, part=ranks.owner_of(group), **options)}
    generator = np.random.default_rng(1)
    found = {"wrong": {"columns": 0, "owner": 0}, "steps": 0, "special": 0}
    for number in range(12):
        tokens = generator.integers(0, stores["whole"]._vocabulary, (40, 1, 5)[number % 3])
        for layer in options["layers"]:
            rows = {}
            for name, opened in stores.items():
                with opened.prefetch(tokens) as batch:
                    rows[name] = batch.rows(layer)
            parts = [torch.empty_like(rows["columns"]) for _ in range(2)]
            distributed.all_gather(parts, rows["columns"])
            rows["columns"] = torch.cat(parts, 1)
            distributed.all_reduce(rows["owner"].view(torch.int32))
            for name in ("columns", "owner"):
                found["wrong"][name] += not torch.equal(rows[name].view(torch.int16), rows["whole"].view(torch.int16))
            bits = rows["whole"].view(torch.int16).numpy().view(np.uint16)
            found["special"] += int(((bits == 0x8000) | (bits & 0x7F80 == 0x7F80)).sum())
        found["steps"] += 1
    found["reads"] = {name: opened.stats().reads for name, opened in stores.items()}
    for opened in stores.values():
        opened.close()

    # groups that do not agree
    def refusal(mine):
        try:
            ranks.open_store(mine, group, **options).close()
        except SSDGramError as error:
            return f"{type(error).__name__}: {error}"
        return "served"

    found["setting"] = refusal(settings(("none", "owner")[rank]))
    found["conversion"] = refusal(settings(path=(store, other)[rank]))
    found["missing"] = refusal(settings(path=(store, f"{store}-of-another-node")[rank]))
    found["left"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("ssdgram-")]
    distributed.destroy_process_group()
    return found
