"""RaggedShard tensors: DTensors cut into unequal flat pieces."""

from __future__ import annotations

from raggedfsdp._C import Granularity, RaggedShard
from raggedfsdp.tensor._distribute import distribute_tensor
from raggedfsdp.tensor._dtensor import RaggedDTensor
from raggedfsdp.tensor._gather import gathering
from raggedfsdp.tensor._random import initialize_

__all__ = ["Granularity", "RaggedDTensor", "RaggedShard", "distribute_tensor", "gathering", "initialize_"]
