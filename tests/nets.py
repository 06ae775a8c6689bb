"""Modules of tests: layers by their names, and a function of them."""

from torch import nn


class Net(nn.Module):
    """Layers and parameters by name, and a function of them and the inputs."""

    def __init__(self, of, **parts):
        super().__init__()
        self.of = of
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs, **named):
        return self.of(self, *inputs, **named)
