"""What opening costs a fresh process, and how its memory grows while the cache fills: each asked of a process of its own.

    python -m ssdgram.bench.footprint opening STORE DRAM
    python -m ssdgram.bench.footprint growth STORE DRAM BATCHES LONGEST

Prints one JSON object. Memory is anonymous and shared memory (the store's arena is shared memory); file pages, that is
libraries, are left out. Nothing heavy may be imported at the top of this file: the import is part of what is measured.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def memory() -> int:
    """Bytes of anonymous and shared memory of this process."""
    try:
        found = re.findall(r"^Pss_(?:Anon|Shmem):\s*(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        found = []
    if len(found) != 2:
        found = re.findall(r"^Rss(?:Anon|Shmem):\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return sum(int(kib) for kib in found) * 1024


def opening(out: str, dram: str) -> dict[str, Any]:
    """Seconds of the import and of the call (and of processor), bytes that the call added, whether torch came along."""
    begin = time.perf_counter()
    import ssdgram.store

    imported, before = time.perf_counter(), memory()
    opened, used = time.perf_counter(), time.thread_time()
    store = ssdgram.store.open(out, dram)
    done, cpu = time.perf_counter(), time.thread_time() - used
    result = {"import_s": imported - begin, "open_s": done - opened, "open_cpu_s": cpu, "bytes": memory() - before,
              "torch": "torch" in sys.modules}
    store.close()
    return result


def growth(out: str, dram: str, batches: str, longest: str) -> dict[str, Any]:
    """Memory after import, open, first batch; the cache filled by batches of `longest` tokens; that many steps; a tenth as many
    long batches."""
    import numpy as np

    import ssdgram.store

    random = np.random.default_rng()
    marks = {"imported": memory()}
    with ssdgram.store.open(out, dram, tuning=ssdgram.store.Tuning(degraded_after_s=30)) as store:
        marks["opened"] = memory()

        def serve(tokens: np.ndarray) -> None:
            with store.prefetch(tokens) as batch:
                batch.wait(timeout_s=120)

        def fresh(count: int) -> np.ndarray:
            return random.integers(3, store.geometry.vocab_size, count).astype(np.int32)

        serve(fresh(64))
        marks["started"] = memory()
        filling, spare = 0, store.stats().slots // 32        # a few slots are in no set
        while store.stats().slots_free > spare:
            serve(fresh(int(longest)))
            filling += 1
            if filling * int(longest) > 10 * store.stats().slots:
                raise RuntimeError(f"the cache does not fill: {store.stats().slots_free} slots are free, {spare} were to be")
        marks["filled"] = memory()
        known, long = [fresh(64) for _ in range(64)], fresh(int(longest))
        for k in range(int(batches)):
            serve(fresh(64) if k % 8 == 7 else known[k % 64])
        marks["steps"] = memory()
        for _ in range(int(batches) // 10):                  # more than there are batch rows: whatever a row keeps is kept now
            serve(long)
        marks["end"] = memory()
        after = store.stats()
        return {"marks": marks, "filling_batches": filling, "batches": int(batches), "slots": after.slots,
                "slots_free": after.slots_free, "evictions": after.evictions, "budget": store._budget}


def ask(name: str, *arguments: str | int | Path) -> dict[str, Any]:
    """Run one of the two in a fresh process; what it found."""
    command = [sys.executable, "-m", "ssdgram.bench.footprint", name, *map(str, arguments)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise RuntimeError(f"{' '.join(command[2:])} ended with {answer.returncode}: {answer.stderr.strip()[-2000:]}")
    result: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    print(json.dumps(opening(*sys.argv[2:]) if sys.argv[1] == "opening" else growth(*sys.argv[2:])))
