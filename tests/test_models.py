"""The models: their sizes worked out by hand, their fit to the data, their errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision.models import get_model

from sapus_cli.errors import UserError
from sapus_cli.workloads.data import DataSet, make_dataset
from sapus_cli.workloads.models import build_model


def _images(channels: int, size: int, n_classes: int = 10) -> DataSet:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (4, channels, size, size), generator=generator, dtype=torch.uint8)
    part = x, torch.arange(4) % n_classes
    return make_dataset("toy", "image", part, part, n_classes)


def _text(n_chars: int = 103, context: int = 64) -> DataSet:
    x = (torch.arange(4 * context) % n_chars).view(4, context).to(torch.uint8)
    return make_dataset("toy text", "text", (x, x), (x, x), n_chars)


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


LAYER = 2 * 128 + (64 * 192 + 192) + (64 * 64 + 64) + (64 * 256 + 256) + (256 * 64 + 64)  # norms, qkv, out, up, down


@pytest.mark.parametrize(
    ("name", "data", "n_params"),
    [
        ("mlp", _images(1, 8), (64 * 256 + 256) + (256 * 256 + 256) + (256 * 10 + 10)),
        ("cnn", _images(1, 8), (9 * 16 + 16) + (16 * 9 * 32 + 32) + (512 * 64 + 64) + (64 * 10 + 10)),
        ("cnn", _images(3, 32), (27 * 16 + 16) + (16 * 9 * 32 + 32) + (512 * 64 + 64) + (64 * 10 + 10)),
        ("lenet5", _images(1, 28), 61_706),  # the usual count: 156 + 2416 + 48120 + 10164 + 850
        ("lenet5", _images(1, 32), 61_706),
        ("resnet20", _images(3, 32), 269_722),  # 0.27 million in table 6 of He et al.
        ("gpt", _text(), 103 * 64 + 64 * 64 + 2 * LAYER + 128 + 64 * 103),
    ],
)
def test_the_number_of_parameters(name: str, data: DataSet, n_params: int) -> None:
    assert _size(build_model(name, data, 0)) == n_params


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet20", "gpt", "torchvision:shufflenet_v2_x0_5"])
def test_the_seed_alone_determines_the_weights(name: str) -> None:
    data = _text() if name == "gpt" else _images(1, 16)
    first = build_model(name, data, 3).state_dict()
    torch.rand(5)
    again = build_model(name, data, 3).state_dict()
    other = build_model(name, data, 4).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_building_leaves_the_random_state_of_the_caller_alone() -> None:
    before = torch.random.get_rng_state()
    build_model("torchvision:mobilenet_v2", _images(3, 32), 0)  # one with dropout in its forward pass
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_trial_forward_pass_leaves_batchnorm_alone() -> None:
    state = build_model("resnet20", _images(3, 32), 0).state_dict()
    assert all(int(value) == 0 for key, value in state.items() if key.endswith("num_batches_tracked"))
    assert all(not value.any() for key, value in state.items() if key.endswith("running_mean"))


def test_gpt_does_not_look_ahead() -> None:
    model = build_model("gpt", _text(), 0).eval()
    x = torch.randint(0, 103, (1, 64), generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[0, 40] = (x[0, 40] + 1) % 103
    with torch.no_grad():
        difference = (model(x) - model(changed)).abs().amax(-1)[0]
    assert not difference[:40].any()
    assert difference[40:].all()


def test_lenet5_says_how_small_is_too_small() -> None:
    build_model("lenet5", _images(1, 12), 0)
    with pytest.raises(UserError, match="'lenet5' needs images of at least 12x12, not 8x8; give cnn"):
        build_model("lenet5", _images(1, 8), 0)


def test_small_images_keep_their_resolution_in_a_torchvision_stem() -> None:
    model = build_model("torchvision:resnet18", _images(1, 28, n_classes=7), 0)
    stem = model.get_submodule("conv1")
    assert isinstance(stem, nn.Conv2d)
    assert (stem.in_channels, stem.out_channels, stem.kernel_size, stem.stride) == (1, 64, (3, 3), (1, 1))
    assert stem.bias is None
    assert isinstance(model.get_submodule("maxpool"), nn.Identity)
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 7)


def test_large_images_keep_the_stem_but_for_their_channels() -> None:
    model = build_model("torchvision:resnet18", _images(1, 96), 0)
    stem = model.get_submodule("conv1")
    assert isinstance(stem, nn.Conv2d)
    assert (stem.in_channels, stem.kernel_size, stem.stride, stem.padding) == (1, (7, 7), (2, 2), (3, 3))
    assert isinstance(model.get_submodule("maxpool"), nn.MaxPool2d)


def test_a_stem_that_fits_is_left_as_it_is() -> None:
    data = _images(3, 65)
    name = "mobilenet_v3_small"
    stem = build_model(f"torchvision:{name}", data, 0).get_submodule("features.0.0")
    assert isinstance(stem, nn.Conv2d)
    assert (stem.kernel_size, stem.stride) == ((3, 3), (2, 2))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        untouched = get_model(name, weights=None, num_classes=10).get_submodule("features.0.0")
    assert torch.equal(stem.weight, untouched.get_parameter("weight"))


def test_a_nested_stem_is_replaced_where_it_stands() -> None:
    stem = build_model("torchvision:mobilenet_v3_small", _images(1, 32), 0).get_submodule("features.0.0")
    assert isinstance(stem, nn.Conv2d)
    assert (stem.in_channels, stem.stride) == (1, (1, 1))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("resnet", _images(3, 32), "unknown model 'resnet'; did you mean resnet20"),
        ("torchvision:resnet19", _images(3, 32), "unknown torchvision model 'resnet19'; did you mean resnet1"),
        ("torchvision:vit_b_32", _images(3, 32), "'torchvision:vit_b_32' cannot take samples of shape 3x32x32.*224"),
        ("torchvision:googlenet", _images(3, 32), "returns a GoogLeNetOutputs and not one tensor"),
        ("cnn", _images(1, 1), "'cnn' cannot take samples of shape 1x1x1"),
        ("gpt", _images(3, 32), "takes text"),
        ("mlp", _text(), "takes images"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_in_one_line(name: str, data: DataSet, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build_model(name, data, 0)
    assert "\n" not in str(caught.value)


def test_a_seed_below_zero_is_refused() -> None:
    with pytest.raises(UserError, match="seed -1"):
        build_model("mlp", _images(1, 8), -1)
