"""The cache in plain Python: hash, set, sketch of the past, policy. What the compiled code must agree with, request by request."""

from __future__ import annotations

ALL = 2**64 - 1
WAYS, PATIENCE, TOP, ONCE, GHOSTS = 16, 8, 15, 8, 32


def plain_mix(x: int, group: int) -> int:
    h = x ^ (group * 0x9E3779B97F4A7C15 & ALL)
    h = (h ^ h >> 32) * 0xD6E8FEB86659FD93 & ALL
    h = (h ^ h >> 32) * 0xD6E8FEB86659FD93 & ALL
    return h ^ h >> 32


def plain_set(x: int, group: int, sets: int) -> int:
    return (plain_mix(x, group) >> 32) * sets >> 32


class PlainSketch:
    """A block as a list of (fingerprint, count), newest first."""

    def __init__(self) -> None:
        self.ghosts: list[tuple[int, int]] = []

    def remember(self, h: int, count: int) -> None:
        self.ghosts.insert(min(len(self.ghosts), ONCE if count == 1 else 0), (h >> 8 & 0xFFF, count))
        del self.ghosts[GHOSTS:]

    def count_of(self, h: int) -> int:
        return next((count for fingerprint, count in self.ghosts if fingerprint == h >> 8 & 0xFFF), 0)

    def recall(self, h: int) -> int:
        for place, (fingerprint, count) in enumerate(self.ghosts):
            if fingerprint == h >> 8 & 0xFFF:
                del self.ghosts[place]
                return count
        return 0


class Entry:
    """What a way holds."""

    def __init__(self, key: tuple[int, int], slot: int, count: int) -> None:
        self.key, self.slot, self.count, self.age = key, slot, count, 0


class PlainSet:
    """One set of the directory with its sketch, under the policy: a list of 16 ways."""

    def __init__(self) -> None:
        self.ways: list[Entry | None] = [None] * WAYS
        self.sketch = PlainSketch()

    def find(self, key: tuple[int, int]) -> int:
        return next((way for way, entry in enumerate(self.ways) if entry is not None and entry.key == key), -1)

    def touch(self, way: int) -> None:
        entry = self.ways[way]
        assert entry is not None
        entry.count, entry.age = min(entry.count + 1, TOP), 0

    def evict(self, way: int) -> int:
        entry, self.ways[way] = self.ways[way], None
        if entry is None:
            return -1
        self.sketch.remember(plain_mix(*entry.key), entry.count)
        return entry.slot

    def insert(self, key: tuple[int, int], slot: int) -> int:
        count = min(self.sketch.recall(plain_mix(*key)) + 1, TOP)
        if None in self.ways:
            way = self.ways.index(None)
        else:
            entries = [entry for entry in self.ways if entry is not None]
            way = min(range(WAYS), key=lambda k: (entries[k].count / (entries[k].age + PATIENCE), -entries[k].age, k))
        pushed_out = self.evict(way)
        for entry in self.ways:
            if entry is not None:
                if entry.age < 255:
                    entry.age += 1
                elif entry.count > 1:
                    entry.count, entry.age = entry.count // 2, 127
        self.ways[way] = Entry(key, slot, count)
        return pushed_out
