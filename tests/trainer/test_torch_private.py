"""Names of torch that are not public: one file has them, and the installed torch does what that file says."""

import re

import pytest
import tinyruns as runs
import torch

from declutr.trainer import torch_private as private

PRIVATE = re.compile(r"torch(?:\.\w+)*\._[a-z]\w*|torch\.ops\.(?!declutr)\w+\._\w+")
ALLOWED = "trainer/torch_private.py"


def test_one_file_uses_names_of_torch_that_are_not_public():
    files = [path for folder in ("src", "pipeline", "trainer") for path in (runs.ROOT / folder).rglob("*.py")]
    used = {str(path.relative_to(runs.ROOT)) for path in files if PRIVATE.search(path.read_text())}
    assert used == {ALLOWED}


def test_the_installed_torch_has_them():
    weight, inputs, bias = torch.randn(6, 4), torch.randn(3, 4), torch.randn(6)
    many, step = [torch.full((2,), 3.0)], torch.full((), 1.0)
    moments = [[torch.zeros(2)], [torch.zeros(2)]]
    settings = {"lr": 0.5, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 0.0}
    try:
        private.multiply_all(many, 2.0)
        assert many[0].tolist() == [6.0, 6.0]
        private.fused_adamw(many, [torch.ones(2)], *moments, [], [step], amsgrad=False, maximize=False, **settings)
        assert many[0].tolist() == pytest.approx([5.5, 5.5])
        private.raise_recompile_limit(torch._dynamo.config.recompile_limit)
        assert private.flight_recorders()
        if private.can_pack_linear():
            with torch.inference_mode():
                outputs = private.packed_linear(inputs, private.pack_linear(weight, 16), bias)
            torch.testing.assert_close(outputs, inputs @ weight.T + bias)
    except (AttributeError, TypeError, RuntimeError) as error:
        pytest.fail(f"torch {torch.__version__} lacks or has changed a name of {ALLOWED}: {error}", pytrace=False)
