"""RaggedFSDP: train PyTorch models fully sharded, with shards that never cut a block.

The names are those of PyTorch's FSDP2: a training loop written for it runs after changing the import.
"""

from __future__ import annotations

import torch  # noqa: F401  (loads the libraries that the extension links to)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from raggedfsdp._version_check import built_for, check_torch

check_torch(built_for())

from raggedfsdp._C import CommError, Granularity, InternalError, RaggedShard, UsageError  # noqa: E402
from raggedfsdp._fully_shard import fully_shard  # noqa: E402
from raggedfsdp._module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx  # noqa: E402
from raggedfsdp.plan import (  # noqa: E402
    Plan,
    PlanOptions,
    TensorSpec,
    UnitBucket,
    UnitPlan,
    UnitPlanOptions,
    explain_padding,
    plan_bucket,
    plan_unit,
    plan_units,
    ragged_cut,
)
from raggedfsdp.state_dict import full_state_dict, load_full_state_dict  # noqa: E402
from raggedfsdp.tensor import RaggedDTensor, distribute_tensor, gathering, initialize_  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "CPUOffloadPolicy",
    "CommError",
    "FSDPModule",
    "Granularity",
    "InternalError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Plan",
    "PlanOptions",
    "RaggedDTensor",
    "RaggedShard",
    "TensorSpec",
    "UnitBucket",
    "UnitPlan",
    "UnitPlanOptions",
    "UnshardHandle",
    "UsageError",
    "distribute_tensor",
    "explain_padding",
    "full_state_dict",
    "fully_shard",
    "gathering",
    "initialize_",
    "load_full_state_dict",
    "plan_bucket",
    "plan_unit",
    "plan_units",
    "ragged_cut",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
