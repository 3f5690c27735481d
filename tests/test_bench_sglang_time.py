"""bench engines_sglang_time without a GPU: what is drawn is what is staged, hits are hits and misses misses. No times are judged."""

import enum
import sys
import types

import numpy as np
import torch

from ssdgram.bench import engines_sglang_time
from ssdgram.engines.settings import Settings
from ssdgram.kernels.dequant import value_table


class ForwardMode(enum.Enum):
    DECODE = 1

    def is_decode(self):
        return True

    def is_idle(self):
        return False

    def is_target_verify(self):
        return False


def test_a_step_is_staged_as_it_is_drawn(engram, served, monkeypatch):
    module = types.ModuleType("sglang.srt.model_executor.forward_batch_info")
    module.ForwardMode = ForwardMode
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(engines_sglang_time.Step, "_captured", lambda self: types.SimpleNamespace(replay=self.stock))
    monkeypatch.setattr(engines_sglang_time, "WARM_UP", 1)
    monkeypatch.setattr(engines_sglang_time, "COLD", 2)
    store = served(engram, dram="16MiB", scale_rule="sglang")
    stream = engram.tokens(300).astype(np.int64)
    with store.prefetch(stream) as batch:
        batch.wait()
    asked = []

    def table(ids):
        asked.append(ids.clone())
        return ids

    table.rows = 1000
    step = engines_sglang_time.Step(store, table, stream, 5, Settings(store=str(engram.out)), "cpu")
    result = step.times(3)
    assert result["misses_while_hits_are_timed"] == 0 and result["all_misses"]["page_reads"] > 0
    assert set(result) == {"ours", "engine_graph", "engine_eager", "misses_while_hits_are_timed", "all_misses"}
    assert len(asked) == 16 and len({part.numpy().tobytes() for part in asked}) == 16    # two layers, two sides, four rounds: all anew
    step.draw(fresh=False)
    step.ours()
    windows = np.concatenate([step.hasher.history[:5].numpy(), step.buffers.input_ids.numpy()[:, None]], 1)
    codes = value_table("fp8_ue8m0", scale_rule="sglang")
    for embed in step.backend.embeds:
        for number, window in enumerate(windows):
            packed = engram.expected(embed.layer_id, window)[-1]
            dim = engram.geometry.row_dim
            wanted = codes[np.repeat(packed[:, dim:], 32, axis=-1)[:, :dim].astype(np.int64) * 256 + packed[:, :dim]]
            np.testing.assert_array_equal(embed.graph_rows[number].view(torch.int16).numpy().view(np.uint16), wanted)
