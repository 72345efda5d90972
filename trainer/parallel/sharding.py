"""Parameters, gradients and moments shared out among the workers: FSDP2 around every layer of the encoder.

A sharded layer's forward and backward are exchanges, in which every worker must take part equally often and with a
gradient for the same parameters. Three rules make that so, whatever a worker's share of the batch:

- a batch goes through a sharded encoder together with a blank span (`SpanBatch.with_blank`), whose gradient is exactly
  zero, so that no layer and no head is left out: not without documents, not without a token to predict;
- a worker with fewer microbatches than another runs empty ones (`Stepper`, `Validator`);
- everything else works on whole tensors: what is saved is what an unsharded run saves.
"""

from typing import Any

from torch import Tensor

from trainer.model.encoder import Encoder
from trainer.parallel.world import World, is_part


def shard(encoder: Encoder, world: World) -> None:
    """Leaves each worker its part of every parameter; before the optimizer is made, with a process group of the world.

    Layers are gathered one by one. Embeddings, the MLM head (tied to them) and the projection are gathered together.

    Args:
        encoder: whole and the same on every worker; changed in place. With one worker it stays as it is.
        world: the workers.
    """
    if world.size == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
    from transformers.modeling_layers import GradientCheckpointingLayer

    mesh = init_device_mesh(next(encoder.parameters()).device.type, (world.size,))
    layers = [module for module in encoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in [*layers, encoder]:
        # also the outermost: between two forwards, and for whoever reads parameters, they are always sharded
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in encoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # gradients are summed over workers: see trainer/parallel/world.py
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    register_fsdp_forward_method(encoder, "embed")
    encoder.sharded = True


def whole(tensor: Any) -> Tensor:
    """The whole of a sharded tensor, on every worker; every worker must ask. Another tensor is returned as it is."""
    kept: Tensor = tensor.full_tensor() if is_part(tensor) else tensor
    return kept


def part_for(value: Tensor, parameter: Any) -> Tensor:
    """A whole tensor of a parameter's shape as the parameter is held: the worker's part where it is sharded."""
    value = value.to(parameter.device)
    if not is_part(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    # every worker has read the same values: nothing is sent
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
