"""Imports what the processes of the tests need, once for all of them, in the server that they are forked from."""

import functorch  # noqa: F401  (tracing takes it)
import pytest  # noqa: F401
import safetensors.torch  # noqa: F401
import torch.distributed.checkpoint.state_dict
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.tensor.debug
import torch.distributed.tensor.parallel  # noqa: F401

import bayesopt_chain as bc

EVERY_NAME = [
    getattr(bc, name) for name in bc.__all__
]  # the package imports a file when a name in it is first asked for
