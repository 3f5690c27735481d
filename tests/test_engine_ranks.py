"""Ranks that share no memory, two processes over gloo: one store's rows bit for bit, and groups that do not agree."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import two_ranks
from rank_groups import Group

from ssdgram.engines import ranks
from ssdgram.engines.ranks import SPLITS
from ssdgram.engines.settings import SPLITS as VALUES
from ssdgram.engines.settings import Settings


def run(work, tmp_path, *arguments):
    """What `two_ranks.WORK(rank, rendezvous, ...)` came to on each rank."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(work, rank, str(tmp_path / "rendezvous"), *arguments) for rank in range(2)]
        return [future.result(timeout=270) for future in futures]


def test_every_engine_and_family_has_its_way():
    from ssdgram.geometry import ENGRAM, PLE

    assert set(SPLITS) == {(engine, family) for engine in ("vllm", "sglang") for family in (ENGRAM, PLE)}
    assert {way for way, _ in SPLITS.values()} == set(VALUES) - {"none"}


def test_the_other_ranks_hear_of_an_error_of_any_kind(monkeypatch):
    """They wait for every rank's word: also for that of one whose GPU has too little memory, which is torch's error."""
    said = []

    def open_store(settings, **options):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(ranks.opening, "open_store", open_store)
    monkeypatch.setattr(ranks, "exchange", lambda group, what: said.append(what))
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        ranks.open_store(Settings(store="/store"), Group(1, 2))
    assert said == ["RuntimeError: CUDA out of memory"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_ways_give_one_stores_rows_and_groups_that_do_not_agree_end_on_every_rank(engram, other, tmp_path):
    """One pair of processes for all of it: they are slow to start."""
    engram.open(queue="threads").close()                     # compiled here, if it is not yet: the ranks wait for each other by the clock
    first, second = run(two_ranks.work, tmp_path, str(engram.out), str(other.out))
    for found in (first, second):
        assert found["wrong"] == {"columns": 0, "owner": 0} and found["steps"] == 12
        assert found["special"] > 0                          # -0.0, NaN or infinity were among the rows that were added up
        for way in ("columns", "owner"):                     # a part of the reads each
            assert 0 < found["reads"][way] < 0.7 * found["reads"]["whole"]
    assert "rank 1 on " in first["setting"] and first["setting"] == second["setting"] and "SSDGRAM_SPLIT=owner" in first["setting"]
    assert first["conversion"] == second["conversion"] and first["conversion"].count("generation") >= 2
    assert first["missing"].startswith("ConfigError: ") and "rank 1 on " in first["missing"] and "is missing" in first["missing"]
    assert second["missing"].startswith("ManifestError: ")
    assert first["left"] == second["left"] == []


@pytest.mark.parametrize("way", sorted(set(VALUES) - {"none"}))
def test_the_settings_say_what_the_table_says(way):
    from ssdgram.engines.settings import read_settings

    assert read_settings({"SSDGRAM_STORE": "/store", "SSDGRAM_SPLIT": way}).split == way
