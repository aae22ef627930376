"""Ranks: the process groups of torch.distributed, and meetings of their members."""

from offload.distributed.groups import find_groups, is_one_of_several, world
from offload.distributed.rendezvous import Rendezvous

__all__ = ["Rendezvous", "find_groups", "is_one_of_several", "world"]
