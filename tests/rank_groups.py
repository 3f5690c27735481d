"""A tensor-parallel group in one process: the others say what this rank says; what it gives to a collective is kept, and stays as it is."""

import torch

from ssdgram.engines import ranks


class Group:
    cpu_group, unique_name = None, "tp:0"

    def __init__(self, rank, world):
        self.rank_in_group, self.world_size, self.given = rank, world, []

    def all_reduce(self, tensor):
        self.given.append(tensor)
        return tensor.clone()

    def all_gather(self, tensor, dim):
        assert dim == 1
        self.given.append(tensor)
        return tensor

    @property
    def shapes(self):
        """Of what was given, in order: the same on every rank, or they would wait for ever."""
        return [(tuple(tensor.shape), tensor.dtype) for tensor in self.given]


def agreeing(monkeypatch, others=None):
    """All ranks open the same; or what `others` say of theirs."""
    monkeypatch.setattr(ranks, "exchange", lambda group, what: [("here", what)] + [("there", others or what)] * (group.world_size - 1))


def added(parts):
    """bf16 rows of which each rank has some and zeros, as whole numbers: what an all-reduce of whole numbers makes of them."""
    bits = torch.stack([part.view(torch.int16) for part in parts])
    assert ((bits != 0).sum(0) <= 1).all()
    return bits.sum(0, dtype=torch.int16).view(torch.bfloat16)
