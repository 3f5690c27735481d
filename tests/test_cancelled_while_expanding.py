"""A batch that is released while it makes its page reads: what it made must be read all the same, for others may have joined it.

Found by `ssdgram warmup` on a busy machine: a step batch that asked for what a released background batch had begun waited
for ever, because the records of the layer in work were never handed to the readers.
"""

import time
from pathlib import Path

import numpy as np
import pytest

import ssdgram
from ssdgram.store import Tuning

TOKENIZER = Path(__file__).parent / "golden/tiny_v41/tokenizer.json"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    ssdgram.synthesize(folder / "checkpoint", vocab_size=211, tokenizer=TOKENIZER, hidden_size=64)
    ssdgram.convert(folder / "checkpoint", folder / "store")
    return folder / "store"


@pytest.mark.parametrize("queue", ["threads", "uring"])
def test_those_who_joined_get_their_rows(out, queue):
    random = np.random.default_rng(5)
    try:
        ssdgram.open(out, dram="32MiB", queue=queue).close()
    except ssdgram.UnavailableError:
        pytest.skip("io_uring is refused here")
    for _ in range(3):
        with ssdgram.open(out, dram="32MiB", queue=queue, tuning=Tuning(degraded_after_s=60)) as store:
            for _ in range(20):
                tokens = random.integers(3, store.geometry.vocab_size, 200).astype(np.int32)
                first = store.prefetch(tokens, priority="background")
                if random.random() < 0.5:
                    time.sleep(random.random() * 5e-4)
                first.release()
                with store.prefetch(tokens) as second:
                    second.wait(timeout_s=20)
