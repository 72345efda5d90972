"""Compiled layers: when their gradients are sent, and how many graphs they need."""

import cpukernel
import pytest
import torch
from measures import deviation
from tiny import random_spans, tiny_encoder
from torch._dynamo.testing import CompileCounter

from declutr.trainer.model import kernels
from declutr.trainer.model.compilation import compile_layers, parts
from declutr.trainer.model.kernel_choice import Kernels
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.parallel.overlap import BucketedReducer

LENGTHS = [9, 3, 30, 12, 12, 4, 27, 9]
LAYERS = 9  # torch makes at most 8 graphs of a function, unless more are allowed
CPU = torch.device("cpu")


def deep(layers=LAYERS, family="roberta", kernel=True, **settings):
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": layers, "initializer_range": 0.1}
    encoder = tiny_encoder(family, torch.float32, from_config=shape, dropout=0.2, **settings)
    for drops in (False, True):
        encoder._kernels[CPU, drops] = Kernels(kernels.attend) if kernel else None
    return encoder


def backward(encoder, batch):
    """Gradients of a loss in half precision."""
    encoder.zero_grad(set_to_none=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings, mlm = encoder(batch)
    (embeddings.square().sum() + mlm).backward()
    return [p.grad.clone() for p in encoder.parameters() if p.grad is not None]


class Noting(BucketedReducer):
    """Notes how many layers' backwards have run when a bucket is complete, and sends nothing."""

    def _send(self, bucket):
        self.notes.append(len(cpukernel.BACKWARDS))
        bucket.sent = bucket.flat


def layers_done(encoder):
    """For each bucket of the encoder's parameters, the layers whose backward has run when it is sent."""
    reducer = Noting(Communicator(), list(encoder.model.base_model.parameters()), bucket_bytes=2**12)
    reducer.notes = []
    for _ in range(2):
        cpukernel.BACKWARDS.clear()
        reducer.notes.clear()
        reducer.begin()
        reducer.arm()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = encoder.hidden(random_spans(LENGTHS))
        hidden.square().sum().backward()
    assert len(cpukernel.BACKWARDS) == encoder.model.config.num_hidden_layers
    assert len(reducer.notes) == len(reducer.buckets) > len(cpukernel.BACKWARDS)
    return reducer.notes


@pytest.mark.slow
def test_compile_layers_while_the_backward_runs_sends_buckets():
    """As without compilation; in one graph of the whole encoder, all would be sent after the last layer."""
    torch._dynamo.reset()
    eager, compiled, whole = (deep(layers, attention_dropout=0.0) for layers in (LAYERS, LAYERS, 2))
    compile_layers(compiled.model.base_model, backend="aot_eager")
    whole.model.base_model.compile(backend="aot_eager", dynamic=True)
    expected, found = layers_done(eager), layers_done(compiled)
    assert found[0] == 1
    assert max(one - other for one, other in zip(found, expected, strict=True)) <= 1
    assert set(layers_done(whole)) == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [("roberta", "kernel"), ("roberta", "groups"), ("roberta", "padded"), ("modernbert", "kernel")],
)
def test_compile_layers_of_any_number_of_layers_makes_the_same_graphs(family, layout):
    """With dropped attention weights, whose masks depend on the layer's number; gradients are those without graphs."""
    settings = {
        "attention_dropout": 0.0 if layout == "kernel" else 0.2,
        "kernel": layout == "kernel",
        "layout": "padded" if layout == "padded" else "packed",
    }
    graphs = []
    for layers in (4, LAYERS):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled, eager = (deep(layers, family, **settings) for _ in range(2))
        compile_layers(compiled.model.base_model, backend=counter)
        for number, lengths in enumerate((LENGTHS, [17, 3])):
            batch = random_spans(lengths, num_selected=2, seed=number)
            assert deviation(backward(compiled, batch), backward(eager, batch)) < 1e-6
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1] > 1


def test_parts_of_an_encoder_are_its_embeddings_and_layers():
    body = deep().model.base_model
    assert list(parts(body)) == [body.embeddings, *body.encoder.layer]
    assert list(parts(body.embeddings)) == [body.embeddings]
    modernbert = deep(family="modernbert").model.base_model  # torch compiles no single norm
    assert list(parts(modernbert)) == [modernbert.embeddings, *modernbert.layers]
