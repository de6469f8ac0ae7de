"""Settings become the arguments of a training."""

import torch

from wellposed.experiments.config import Training


def test_training_as_arguments():
    free, fixed = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3), requires_grad=False)
    settings = Training(epochs=3, learning_rate=0.2, optimizer="sgd", weight_decay=0.1, clip=5.0)
    given = settings.arguments()
    (group,) = given.pop("optimizer")([free, fixed]).param_groups
    assert group["params"] == [free] and (group["lr"], group["weight_decay"]) == (0.2, 0.1)
    assert given == {"epochs": 3, "schedule": "cosine", "batch_size": 128, "patience": None, "clip": 5.0}
