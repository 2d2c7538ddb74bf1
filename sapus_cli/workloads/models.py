"""Models by name, fitted to a data set: the input channels, the number of classes, and for small images the stem."""

from __future__ import annotations

import copy
import math
import re
import warnings
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from sapus_cli.errors import UserError, unknown
from sapus_cli.workloads import MODELS, TORCHVISION_PREFIX, check_kind, check_model, check_seed, is_null, null_elements

if TYPE_CHECKING:
    from collections.abc import Callable

    from sapus_cli.workloads.data import DataSet

SMALL_IMAGE_PX = 64
"""Up to this height and width, a torchvision model's stem keeps the resolution."""

_LENET_MIN_PX = 12  # smaller images vanish in its two 5x5 convolutions and two poolings
_LENET_PX = 32  # the size that LeNet-5 was drawn for


def build_model(name: str, data: DataSet, seed: int) -> nn.Module:
    """Build a model for a data set, with freshly drawn weights, on the CPU.

    Args:
        name: one of `MODELS`, `torchvision:NAME` or `null:ELEMENTS`.
        data: what the model is to be trained on; images `(n, C, H, W)` or text `(n, T)`.
        seed: determines the weights. The caller's random state is not touched.

    Returns:
        A module from `(n, C, H, W)` to logits `(n, n_classes)`, or from `(n, T)`, int64, to `(n, T, n_classes)`;
        for `null` one that has a parameter `(ELEMENTS,)` of zeros and no use for samples.

    Raises:
        UserError: the name is unknown, or the model cannot take samples of this shape.
    """
    check_model(name)
    check_kind(name, data.kind)
    check_seed(seed)
    if is_null(name):
        return nn.ParameterList([torch.zeros(null_elements(name))])
    # Not torch.manual_seed: it would seed the accelerators' generators too, which fork_rng does not save here.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = _BUILDERS[name](data) if name in MODELS else _torchvision(name, data)
        _check_forward(name, model, data)
    return model


def _check_forward(name: str, model: nn.Module, data: DataSet) -> None:
    """Let two samples through a copy, for a forward pass in training mode changes the BatchNorm statistics."""
    x = data.train_x[:2]
    x = x.to(torch.float32 if data.kind == "image" else torch.int64)
    shape = "x".join(str(n) for n in x.shape[1:])
    trial = copy.deepcopy(model).train()
    try:
        with torch.no_grad():
            out = trial(x)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        raise UserError(f"model '{name}' cannot take samples of shape {shape} ({_one_line(error)})") from None
    expected = (len(x), *data.train_y.shape[1:], data.n_classes)
    if not isinstance(out, torch.Tensor):
        raise UserError(
            f"model '{name}' returns a {type(out).__name__} and not one tensor of logits; take another model"
        )
    if out.shape != expected:
        raise UserError(
            f"model '{name}' makes logits of shape {tuple(out.shape)} of two samples of shape {shape}, "
            f"not {expected}; take another model"
        )


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__


def _image_shape(data: DataSet) -> tuple[int, int, int]:
    channels, height, width = data.train_x.shape[1:]
    return channels, height, width


def _mlp(data: DataSet) -> nn.Module:
    """Two hidden layers of 256."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(_image_shape(data)), 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, data.n_classes),
    )


def _cnn(data: DataSet) -> nn.Module:
    """Two 3x3 convolutions, pooled to 4x4 whatever the size of the images, and one hidden layer of 64."""
    return nn.Sequential(
        nn.Conv2d(_image_shape(data)[0], 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, data.n_classes),
    )


def _lenet5(data: DataSet) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998, figure 2) with today's ReLU, max pooling and linear head.

    It was drawn for 32x32; smaller images get a border of two zeros, as LeCun padded the 28x28 of MNIST.
    """
    channels, height, width = _image_shape(data)
    if min(height, width) < _LENET_MIN_PX:
        raise UserError(
            f"model 'lenet5' needs images of at least {_LENET_MIN_PX}x{_LENET_MIN_PX}, not {height}x{width}; give cnn"
        )
    padding = 2 if min(height, width) < _LENET_PX else 0
    final_h, final_w = (((size + 2 * padding - 4) // 2 - 4) // 2 for size in (height, width))
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * final_h * final_w, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, data.n_classes),
    )


class _Block(nn.Module):
    """Two 3x3 convolutions around a shortcut without parameters (He et al. 2016, option A)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.stride = n_out // n_in  # a stage that doubles the width halves the resolution
        self.extra = n_out - n_in
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride=self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(n, n_in, H, W)` to `(n, n_out, ceil(H / stride), ceil(W / stride))`."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return F.relu(out + F.pad(shortcut, (0, 0, 0, 0, 0, self.extra)))


def _resnet20(data: DataSet) -> nn.Module:
    """The 20-layer ResNet for CIFAR (He et al. 2016, section 4.2): three stages of three blocks, 16, 32, 64 wide."""
    widths = [16, *[16] * 3, *[32] * 3, *[64] * 3]
    model = nn.Sequential(
        nn.Conv2d(_image_shape(data)[0], 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *(_Block(n_in, n_out) for n_in, n_out in pairwise(widths)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, data.n_classes),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class _DecoderLayer(nn.Module):
    """Causal self-attention and a feed-forward net, each behind its LayerNorm (pre-norm)."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(n, T, width)` to the same shape."""
        n, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(n, length, 3, self.n_heads, width // self.n_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        hidden: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return hidden


class _GPT(nn.Module):
    """A small decoder over characters, with learnt positions."""

    def __init__(self, n_chars: int, context: int, width: int = 64, n_layers: int = 2, n_heads: int = 4) -> None:
        super().__init__()
        self.chars = nn.Embedding(n_chars, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.layers = nn.Sequential(*(_DecoderLayer(width, n_heads) for _ in range(n_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_chars, bias=False)
        for parameter_name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # GPT-2 (Radford et al. 2019, section 2.3): what adds to the residual stream starts smaller.
                into_stream = parameter_name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * n_layers) if into_stream else 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map character numbers `(n, T)`, int64, to the logits of each next character `(n, T, n_chars)`."""
        hidden = self.chars(x) + self.positions[: x.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.layers(hidden)))
        return logits


def _gpt(data: DataSet) -> nn.Module:
    return _GPT(data.n_classes, data.train_x.shape[1])


_BUILDERS: dict[str, Callable[[DataSet], nn.Module]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "lenet5": _lenet5,
    "resnet20": _resnet20,
    "gpt": _gpt,
}


def _torchvision(name: str, data: DataSet) -> nn.Module:
    """A classifier of torchvision, untrained, its first convolution fitted to the images."""
    from torchvision import models  # noqa: PLC0415 - takes a second, and only these models need it

    short = name.removeprefix(TORCHVISION_PREFIX)
    valid = models.list_models(module=models)
    if short not in valid:
        raise unknown("torchvision model", short, valid)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=FutureWarning)  # googlenet and inception_v3, about their defaults
        model: nn.Module = models.get_model(short, weights=None, num_classes=data.n_classes)
    _fit_stem(model, _image_shape(data))
    return model


def _fit_stem(model: nn.Module, image: tuple[int, int, int]) -> None:
    """Fit a model's first convolution to images `(C, H, W)`.

    Models for images of 224 pixels begin by cutting the resolution to a quarter. Up to `SMALL_IMAGE_PX` pixels, a
    first convolution with a stride becomes 3x3 with stride 1, and a `maxpool` goes, as is usual for CIFAR.
    """
    channels, height, width = image
    name, conv = next((name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d))
    small = max(height, width) <= SMALL_IMAGE_PX
    if small and isinstance(getattr(model, "maxpool", None), nn.Module):
        model.maxpool = nn.Identity()
    if small and max(conv.stride) > 1:
        kernel, stride, padding = (3, 3), (1, 1), (1, 1)
    elif channels != conv.in_channels:
        kernel, stride, padding = (cast("tuple[int, int]", v) for v in (conv.kernel_size, conv.stride, conv.padding))
    else:
        return
    fitted = nn.Conv2d(channels, conv.out_channels, kernel, stride, padding, bias=conv.bias is not None)
    nn.init.kaiming_normal_(fitted.weight, mode="fan_out", nonlinearity="relu")
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, fitted)
