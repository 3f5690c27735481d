"""Model configs: what is accepted, and one message for every way to be wrong."""

from __future__ import annotations

import json
import time

import pytest
from vectors import GOLDEN, PLE_CASES, ple_config, read_json

from ssdgram.configs import MAX_CONFIG_BYTES
from ssdgram.errors import ConfigError
from ssdgram.geometry import Geometry

V41 = read_json("v41_constants.json")["config"]
PLE = ple_config(PLE_CASES[1])[0]


def v41(**changes):
    config = {**V41, **changes}
    return {name: value for name, value in config.items() if value is not ...}


def test_flat_nested_and_from_a_file(tmp_path):
    flat = Geometry.from_config(v41())
    text = v41(image_token_id=...)
    nested = {"architectures": ["X"], "image_token_id": 129264, "vocab_size": 5, "text_config": text}
    assert Geometry.from_config(nested) == flat
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert Geometry.from_config(tmp_path / "config.json") == Geometry.from_config(str(tmp_path)) == flat


def test_v41_numbers():
    g = Geometry.from_config(v41())
    assert (g.family, g.layers, g.orders, g.heads, g.columns, g.max_ngram, g.groups) == ("engram", (1, 14), 3, 8, 24, 4, 6)
    assert (g.row_dim, g.encoding, g.code_bytes, g.scale_bytes, g.row_bytes) == (256, "fp8_ue8m0", 256, 8, 264)
    assert (g.vocab_size, g.compressed_vocab_size, g.pad_token_id, g.image_token_id) == (129280, 99092, 2, 129264)
    assert g.table_rows == (384006168, 384016682) and g.layer_index(14) == 1
    with pytest.raises(ConfigError, match=r"layer 2 has no n-gram table: the layers that have one are \[1, 14\]"):
        g.layer_index(2)


def test_the_miniature_checkpoint():
    g = Geometry.from_config(GOLDEN / "tiny_v41")
    assert (g.layers, g.columns, g.row_bytes, g.table_rows, g.image_token_id) == ((1, 3), 6, 66, (660, 864), 329)


def test_qwen_numbers_and_defaults():
    config = {"text_config": {"ple_layer_ids": [2], "ple_embed_dim": 2560, "vocab_size": 248320, "eos_token_id": [248044, 1],
                              "hidden_size": 9999}}
    g = Geometry.from_config(config)
    assert (g.family, g.layers, g.orders, g.heads, g.columns, g.row_dim) == ("ple", (1,), 2, 8, 16, 160)
    assert (g.encoding, g.row_bytes, g.table_rows, g.eos_token_id) == ("bf16", 320, (320_001_536,), 248044)
    for dtype, encoding, row_bytes in (("float8_e4m3fn", "fp8_global", 160), ("nvfp4", "nvfp4", 90), ("bfloat16", "bf16", 320)):
        config["text_config"]["ple_embedding_dtype"] = dtype
        g = Geometry.from_config(config)
        assert (g.encoding, g.row_bytes) == (encoding, row_bytes)


def test_ple_layers_are_sorted_and_one_based():
    g = Geometry.from_config({**PLE, "ple_layer_ids": [7, 3]})
    assert g.layers == (2, 6)
    assert g.primes == ((31, 37, 41, 43), (47, 53, 59, 61))


def test_the_demos_sizes_per_order():
    demo = read_json("demo.json")
    g = Geometry.from_config(v41(
        engram_layer_ids=demo["layer_ids"], engram_max_ngram_size=3, engram_vocab_size=demo["engram_vocab_size"],
        engram_num_embeddings=[20_000_000, 20_000_000], engram_pad_token_id=..., engram_pad_id=2))
    assert [[list(g.primes[l][:8]), list(g.primes[l][8:])] for l in range(2)] == list(demo["primes"].values())


def test_more_rows_than_the_primes_need_are_allowed():
    g = Geometry.from_config(v41(engram_num_embeddings=[384006168 + 100, 384016682]))
    assert g.table_rows[0] - g.rows_per_layer[0] == 100


@pytest.mark.parametrize("config, message", [
    ({}, r"no n-gram layers: expected engram_layer_ids .* found engram_layer_ids = None, ple_layer_ids = None"),
    (v41(engram_layer_ids=[]), r"no n-gram layers: .* found engram_layer_ids = \[\]"),
    ({"text_config": []}, r"text_config is \[\]: expected an object"),
    (v41(ple_layer_ids=[2]), r"both engram_layer_ids and ple_layer_ids"),
    (v41(engram_layer_ids="1, 14"), r"engram_layer_ids is '1, 14': expected a list of integers"),
    (v41(engram_layer_ids=[1, 1]), r"the layer ids are \[1, 1\] \(0-based\): expected each once"),
    (v41(engram_layer_ids=[-1, 14]), r"engram_layer_ids\[0\] is -1: expected an integer of 0"),
    (v41(engram_layer_ids=[1, 14.0]), r"engram_layer_ids\[1\] is 14.0: expected an integer"),
    (v41(engram_layer_ids=[True, 14]), r"engram_layer_ids\[0\] is True: expected an integer"),
    (v41(engram_layer_ids=list(range(100_000))), r"engram_layer_ids is \[0, 1, 2, 3, 4, 5, \.\.\.\]: expected a list"),
    (v41(num_hidden_layers=14), r"layer 14 \(0-based\) has an n-gram table: expected layers below num_hidden_layers = 14"),
    (v41(engram_max_ngram_size=1), r"engram_max_ngram_size is 1: expected an integer of 2 \.\. 16"),
    (v41(engram_max_ngram_size="4"), r"engram_max_ngram_size is '4': expected an integer"),
    (v41(engram_max_ngram_size=...), r"engram_max_ngram_size is missing: expected an integer of 2"),
    (v41(engram_n_heads=10**9), r"engram_n_heads is 1000000000: expected an integer of 1 \.\. 4096"),
    (v41(engram_n_heads=4096), r"2 layers x 3 orders x 4096 heads: expected at most 4096 columns"),
    (v41(engram_n_heads=0), r"engram_n_heads is 0"),
    (v41(engram_layer_ids=list(range(100)), engram_max_ngram_size=4), r"100 layers of 3 orders: expected at most 255 pairs"),
    (v41(engram_head_dim=48), r"a row has 48 values: expected a multiple of 32 for fp8_ue8m0"),
    (v41(engram_head_dim=None), r"engram_head_dim is missing"),
    (v41(engram_vocab_size=0), r"engram_vocab_size is 0: expected an integer of 1"),
    (v41(engram_vocab_size=2**62), r"engram_vocab_size is 4611686018427387904: 24 columns of that size overflow"),
    (v41(engram_vocab_size=10**5000), r"engram_vocab_size is int with an integer of thousands of digits: expected an integer"),
    (v41(engram_vocab_size=[16_000_000] * 2), r"engram_vocab_size has 2 entries: expected 3"),
    (v41(engram_num_embeddings=[384006167, 384016682]),
     r"engram_num_embeddings of layer 1 is 384006167: expected at least 384006168, the sum of its 24 primes from .* = 16000000"),
    (v41(engram_num_embeddings=[384006168]), r"engram_num_embeddings has 1 entries: expected 2"),
    (v41(engram_num_embeddings=384006168), r"engram_num_embeddings is 384006168: expected a list"),
    (v41(engram_compressed_vocab_size=...), r"engram_compressed_vocab_size is missing"),
    (v41(engram_compressed_vocab_size=129281), r"engram_compressed_vocab_size is 129281: expected an integer of 1 \.\. 129280"),
    (v41(engram_pad_token_id=...), r"engram_pad_token_id is missing"),
    (v41(engram_pad_token_id=129280), r"engram_pad_token_id is 129280: expected an integer of 0 \.\. 129279"),
    (v41(image_token_id=-1), r"image_token_id is -1"),
    ({**PLE, "ple_layer_ids": [0]}, r"ple_layer_ids\[0\] is 0: expected an integer of 1"),
    ({**PLE, "ple_layer_ids": [2, 2]}, r"expected each once"),
    ({**PLE, "hidden_size": 63}, r"hidden_size is 63: expected a multiple of .* = 4"),
    ({**PLE, "vocab_size": None}, r"vocab_size is missing"),
    ({**PLE, "eos_token_id": 97}, r"eos_token_id is 97: expected an integer of 0 \.\. 96"),
    ({**PLE, "eos_token_id": []}, r"eos_token_id is \[\]: expected a list"),
    ({**PLE, "ple_embedding_dtype": "int8"}, r"ple_embedding_dtype is 'int8': expected one of"),
    ({**PLE, "ple_embedding_dtype": []}, r"ple_embedding_dtype is \[\]: expected one of"),
    ({**PLE, "ngram_vocab_size_base": 2**63 - 1}, r"ngram_vocab_size_base is 9223372036854775807: .* overflow"),
])
def test_refused(config, message):
    started = time.process_time()
    with pytest.raises(ConfigError, match=message) as caught:
        Geometry.from_config(config)
    assert time.process_time() - started < 1                 # nothing in a config makes it search or allocate for long
    assert len(str(caught.value)) < 500


def test_the_largest_config_is_quick():
    started = time.process_time()
    g = Geometry.from_config(v41(engram_layer_ids=[5], engram_n_heads=1024, engram_max_ngram_size=5, engram_vocab_size=2**50,
                                 engram_num_embeddings=[2**63 - 1]))
    assert g.columns == 4096 and time.process_time() - started < 20


@pytest.mark.parametrize("content, message", [
    (b"{", "is not JSON"),
    (b"\xff\xfe{}", "is not JSON"),
    (b"[" * 100_000, "is not JSON"),
    (b"[]", r"holds \[\]: expected an object"),
    (b'{"engram_layer_ids": ' + b"1" * 5000 + b"}", "is not JSON"),
    (b" " * (MAX_CONFIG_BYTES + 1), "has more than 16777216 bytes"),
])
def test_files_that_are_no_config(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Geometry.from_config(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        Geometry.from_config(tmp_path / "config.json")
