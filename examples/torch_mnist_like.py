"""A convolutional network on scikit-learn's handwritten digits, on any number of ranks.

    python examples/torch_mnist_like.py                             # alone
    python examples/torch_mnist_like.py --np 2                      # in two local processes
    torchrun --nproc-per-node 2 examples/torch_mnist_like.py        # started by somebody else

Every rank walks through its own rows of each global batch; whatever their number, the model that comes out is the same.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import sparkvod
import sparkvod.torch as hvd


def make_model() -> nn.Module:
    """Returns a small network for images [rows, 1, 8, 8] that gives logits [rows, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 3 * 3, 10),
    )


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns all 1,797 images [rows, 1, 8, 8], float32 in 0 to 1, and their labels [rows]."""
    from sklearn.datasets import load_digits as load

    digits = load()
    return torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)


def train(epochs: int = 5, batch_size: int = 64) -> float:
    """Trains and returns the accuracy on the 297 digits that were kept out; call it on every rank.

    Args:
        epochs: how often all rows are shown.
        batch_size: rows of a step, over all ranks together.
    """
    hvd.init()
    images, labels = load_digits()
    shown, kept = slice(0, 1500), slice(1500, None)
    torch.manual_seed(hvd.rank())
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    # Each rank's loss is weighted by its rows, so the sum of the gradients is the global batch's mean.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Sum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    accuracy = 0.0
    for epoch in range(epochs):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(1)
        for batch in order.split(batch_size):
            mine = batch[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            if len(mine):
                summed = nn.functional.cross_entropy(model(images[shown][mine]), labels[shown][mine], reduction="sum")
                (summed / len(batch)).backward()
                total += summed.detach()
            optimizer.step()
        loss = hvd.allreduce(total, op=hvd.Sum).item() / 1500
        with torch.no_grad():
            accuracy = (model(images[kept]).argmax(1) == labels[kept]).float().mean().item()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy on digits not trained on {accuracy:.1%}")
    return accuracy


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of a step, over all ranks together")
    parser.add_argument("--np", type=int, help="start this many local processes")
    arguments = parser.parse_args()
    if arguments.np:
        sparkvod.run_local(train, (arguments.epochs, arguments.batch_size), np=arguments.np)
    else:
        train(arguments.epochs, arguments.batch_size)


if __name__ == "__main__":
    main()
