"""The peers of `bench warmness` with a table on the device: tokens to row ids to rows, through the classes that the bench runs.

The pinned and the resident table differ in where their tensors lie, and in nothing that is looked at here.
"""

import types

import numpy as np
import torch
from where import DEVICE, GOLDEN, INTERPRETED, put, to_bits

import ssdgram
from ssdgram.bench.warmness import device, text
from ssdgram.bench.warmness.placements import HostTable
from ssdgram.kernels.reference import dequantise
from ssdgram.layout.files import load_token_map, resolve
from ssdgram.layout.manifest import Manifest
from ssdgram.tools.trace import Trace


def test_tokens_to_rows(tmp_path, monkeypatch):
    if INTERPRETED:                                          # no device: pinned memory, streams and the device's size are made up
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(torch.cuda, "Stream", lambda where: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: types.SimpleNamespace(multi_processor_count=3))
    ssdgram.synthesize(tmp_path / "ckpt", vocab_size=3000, layers=(1, 3), seed=5, tokenizer=GOLDEN / "tiny_tokenizer.json")
    ssdgram.convert(tmp_path / "ckpt", tmp_path / "out")
    manifest = Manifest.load(tmp_path / "out")
    geometry, token_map = manifest.geometry, load_token_map(tmp_path / "out", manifest)
    tokens = np.random.default_rng(0).integers(0, 331, 400).astype(np.int32)
    made = text.Text(Trace.of_documents(tokens, np.array([0, 150, 400]), {}), geometry, token_map)
    table = HostTable(manifest, resolve(tmp_path / "out", manifest, None))
    rows = [torch.zeros(200 * geometry.columns, geometry.row_dim, dtype=torch.bfloat16, device=DEVICE) for _ in geometry.layers]
    landing = types.SimpleNamespace(device=torch.device(DEVICE), row_ids=text.RowIds(geometry, token_map, 200), most=200, rows=rows,
                                    finish=lambda: None if INTERPRETED else torch.cuda.synchronize())
    monkeypatch.setattr(device, "load", lambda: None)        # our own lookup kernel
    placement = device.Hbm(geometry, landing, [(put(codes), put(scales)) for codes, scales in zip(table.codes, table.scales)], pinned=False)
    streams, chunk = (11, 24) if INTERPRETED else (70, 150)      # the interpreter takes a millisecond a row
    steps = [*made.decode((0, 400), streams, 2), *made.prefill((100, 400), chunk, 2)]
    placement.prepare(steps[:1])                             # the others are prepared when they are asked for
    for number, step in enumerate(steps):
        if number % 2:                                       # as it is begun ahead
            for layer in range(len(step.ids)):
                placement.gather(step, layer, background=True)
            landing.finish()
        else:
            placement.lookup(step)
        for layer, ids in enumerate(step.ids):
            wanted = dequantise(table.codes[layer][ids.reshape(-1)], table.scales[layer][ids.reshape(-1)])
            number = (wanted & 0x7FFF) <= 0x7F80             # (the interpreter reads NaN codes as 480)
            assert number.mean() > 0.9 and ids.size == len(step) * geometry.columns
            assert np.array_equal(to_bits(landing.rows[layer][:ids.size])[number], wanted[number])
