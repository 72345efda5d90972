"""Shards parameters, gradients and moments over the workers, with FSDP2 around every layer of the encoder.

A sharded layer's forward and backward are exchanges. Every worker must take part equally often and with gradients for
the same parameters. Three rules ensure that for any share of the batch:

- Every batch in a sharded encoder includes a blank span (`SpanBatch.with_blank`) whose gradient is exactly zero. So
  every layer and head takes part, even without documents or without a token to predict.
- A worker with fewer microbatches than another runs empty ones (`TrainTask`, `compute_together`).
- Everything else works on whole tensors. A sharded run saves the same files as an unsharded one.
"""

from typing import Any

from torch import Tensor

from declutr.trainer.model.encoder import Encoder
from declutr.trainer.parallel.communicator import Communicator, is_part


def shard(encoder: Encoder, comm: Communicator) -> None:
    """Shards every parameter over the workers. Call it before the optimizer is made, with a process group.

    Layers are gathered one by one. Embeddings, the MLM head (tied to them) and the projection are gathered together.

    Args:
        encoder: whole and the same on every worker; changed in place. With one worker it is left unchanged.
        comm: the workers.
    """
    if comm.size == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
    from transformers.modeling_layers import GradientCheckpointingLayer

    mesh = init_device_mesh(next(encoder.parameters()).device.type, (comm.size,))
    layers = [module for module in encoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in [*layers, encoder]:
        # the outermost too: outside a forward, parameters are always sharded
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in encoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sum over workers, see trainer/parallel/communicator.py
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    register_fsdp_forward_method(encoder, "embed")
    encoder.sharded = True


def full_tensor(tensor: Any) -> Tensor:
    """The whole tensor on every worker; every worker must call this. An unsharded tensor is returned unchanged."""
    kept: Tensor = tensor.full_tensor() if is_part(tensor) else tensor
    return kept


def shard_like(value: Tensor, parameter: Any) -> Tensor:
    """Converts a whole tensor to the form of its parameter: the worker's part if the parameter is sharded."""
    value = value.to(parameter.device)
    if not is_part(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    # every worker has read the same values, so nothing is sent
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
