"""SupCon's tiles and its relation to NT-Xent."""

import pytest
import torch
from measures import deviation

from declutr.trainer.objectives.declutr.ntxent import ntxent
from declutr.trainer.objectives.supcon.config import SupconConfig
from declutr.trainer.objectives.supcon.objective import supcon


def rows(number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, 7, generator=generator, dtype=torch.float64).requires_grad_()


def differentiated(loss, embeddings):
    (gradient,) = torch.autograd.grad(loss, embeddings)
    return loss.item(), gradient


def test_distinct_labels_are_ntxent():
    embeddings = rows(24)
    labels = torch.arange(12).repeat(2)
    found = differentiated(supcon(embeddings, labels, 0.3), embeddings)
    expected = differentiated(ntxent(embeddings, 0.3), embeddings)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert deviation([found[1]], [expected[1]]) < 1e-12


@pytest.mark.parametrize("tile", [1, 3, 5, 20, 64])
def test_supcon_tiles_change_nothing(tile):
    embeddings, labels = rows(22), torch.tensor([3, 3, 1, 0, 2, 1, 1, 0, 2, 3, 5]).repeat(2)
    scores = torch.nn.functional.normalize(embeddings, dim=-1)
    scores = (scores @ scores.T / 0.2).masked_fill(torch.eye(22, dtype=torch.bool), float("-inf"))
    same = (labels[:, None] == labels[None]).fill_diagonal_(False)
    plain = -(scores.log_softmax(dim=1).where(same, 0).sum(dim=1) / same.sum(dim=1)).mean()
    expected = differentiated(plain, embeddings)
    found = differentiated(supcon(embeddings, labels, 0.2, tile=tile), embeddings)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert deviation([found[1]], [expected[1]]) < 1e-12


def test_order_of_the_batch_changes_nothing():
    embeddings, labels = rows(16).detach(), torch.tensor([0, 1, 2, 0, 1, 3, 3, 2]).repeat(2)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    assert supcon(embeddings[order], labels[order], 0.1).item() == pytest.approx(
        supcon(embeddings, labels, 0.1).item(), rel=1e-12
    )


def test_reference_supcon_survives_a_round_of_its_settings():
    config = SupconConfig(reference_supcon=True)
    assert SupconConfig.model_validate(config.model_dump(mode="json")) == config
    with pytest.raises(ValueError, match="base_temperature"):
        SupconConfig(reference_supcon=True, base_temperature=0.5)
