"""Workloads by name: which data sets and models there are, and which of them go together.

This module knows names only. It imports neither torch nor a data package, so a command line can refuse a wrong name
before anything slow is loaded. `data` loads the data sets, `models` builds the models.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from sapus_cli.errors import UserError, unknown

DATASETS = ("digits", "mnist5k", "pydoc", "mnist", "fashion-mnist", "cifar10", "cifar100", "null")
"""Data sets of a fixed name; `fake:CxHxW:K` comes on top."""

MODELS = ("mlp", "cnn", "lenet5", "resnet20", "gpt")
"""Models of a fixed name; `torchvision:NAME` and `null:ELEMENTS` come on top."""

FAKE_FORM = "fake:CxHxW:K"
TORCHVISION_FORM = "torchvision:NAME"
TORCHVISION_PREFIX = "torchvision:"
NULL_FORM = "null:ELEMENTS"
NULL_ELEMENTS_MAX = 10**9

FAKE_TRAIN, FAKE_TEST = 5000, 1000
"""Samples of a fake data set."""

_FAKE_EXAMPLE = "fake:3x32x32:10"
_FAKE_PIXELS_MAX = 2**18  # the 6000 images of one data set then take at most 1.6 GB


class FakeShape(NamedTuple):
    """What the name `fake:CxHxW:K` asks for."""

    channels: int
    height: int
    width: int
    n_classes: int


def fake_shape(name: str) -> FakeShape:
    """Read a name of the form `fake:CxHxW:K`: images of C channels, H by W pixels, in K classes.

    Raises:
        UserError: the name has another form, or a number is out of range.
    """
    match = re.fullmatch(r"fake:([0-9]{1,6})x([0-9]{1,6})x([0-9]{1,6}):([0-9]{1,6})", name)
    if match is None:
        raise UserError(f"data set '{name}' does not have the form {FAKE_FORM}; give one like {_FAKE_EXAMPLE}")
    shape = FakeShape(*(int(number) for number in match.groups()))
    if not 1 <= shape.channels * shape.height * shape.width <= _FAKE_PIXELS_MAX:
        raise UserError(
            f"data set '{name}': C * H * W must lie in [1, {_FAKE_PIXELS_MAX}]; give one like {_FAKE_EXAMPLE}"
        )
    if not 2 <= shape.n_classes <= FAKE_TEST:  # noqa: PLR2004 - one class leaves nothing to tell apart
        raise UserError(f"data set '{name}': K must lie in [2, {FAKE_TEST}]; give one like {_FAKE_EXAMPLE}")
    return shape


def null_elements(name: str) -> int:
    """Read a name of the form `null:ELEMENTS`: how many elements a state without a model has.

    Raises:
        UserError: the name has another form, or the number is out of range.
    """
    match = re.fullmatch(r"null:([0-9]{1,10})", name)
    if match is None or not 1 <= int(match[1]) <= NULL_ELEMENTS_MAX:
        raise UserError(
            f"model '{name}' must have the form {NULL_FORM}, with a whole number from 1 to {NULL_ELEMENTS_MAX}; "
            "give one like null:100000"
        )
    return int(match[1])


def is_null(model: str) -> bool:
    """Whether a name asks for a state without a model, well-formed or not."""
    return model == "null" or model.startswith("null:")


def default_model(dataset: str) -> str:
    """The model that a data set is trained with if none is named."""
    return {"pydoc": "gpt", "null": "null:100000"}.get(dataset, "cnn")


def default_epochs(dataset: str) -> float:
    """How many passes a run over this data set makes if nothing else is asked for."""
    return {"digits": 120.0, "mnist5k": 30.0, "pydoc": 3.0}.get(dataset, 10.0)


def check_dataset(dataset: str) -> None:
    """Refuse a data set that does not exist.

    Raises:
        UserError: names the nearest data sets, or the form of a malformed `fake:` name.
    """
    if dataset == "fake" or dataset.startswith("fake:"):
        fake_shape(dataset)
    elif dataset not in DATASETS:
        raise unknown("data set", dataset, [*DATASETS, FAKE_FORM])


def check_model(model: str) -> None:
    """Refuse a model that does not exist. What stands behind `torchvision:` is checked when it is built.

    Raises:
        UserError: names the nearest models, or the form of a malformed `null:` name.
    """
    if is_null(model):
        null_elements(model)
        return
    if model in MODELS or (
        model.startswith(TORCHVISION_PREFIX) and model not in (TORCHVISION_PREFIX, TORCHVISION_FORM)
    ):
        return
    raise unknown("model", model, [*MODELS, TORCHVISION_FORM, NULL_FORM])


def check_kind(model: str, kind: str) -> None:
    """Refuse a text model on images, an image model on text, and any of them with nothing.

    Args:
        model: the name of a model.
        kind: "image", "text" or "null", what the data set holds.

    Raises:
        UserError: says which models fit.
    """
    if is_null(model) != (kind == "null"):
        raise UserError(f"model '{model}': {NULL_FORM} goes with the data set null, and with nothing else")
    if kind == "text" and model != "gpt":
        raise UserError(f"model '{model}' takes images and cannot be trained on text; give gpt")
    if kind == "image" and model == "gpt":
        fitting = ", ".join(name for name in MODELS if name != "gpt")
        raise UserError(f"model 'gpt' takes text and cannot be trained on images; give {fitting} or {TORCHVISION_FORM}")


def check_names(dataset: str, model: str) -> None:
    """Refuse a data set or a model that does not exist, and a pair of them that cannot go together.

    Raises:
        UserError: says what is wrong and which names are valid.
    """
    check_dataset(dataset)
    check_model(model)
    check_kind(model, {"pydoc": "text", "null": "null"}.get(dataset, "image"))


def check_partition(text: str, dataset: str | None = None) -> float | None:
    """Read how the training samples are split among the workers: `iid` or `dirichlet:ALPHA`.

    Args:
        text: the partition as it was given.
        dataset: if given, the partition must also suit this data set: text has no labels to skew.

    Returns:
        The concentration ALPHA, or None for `iid`.

    Raises:
        UserError: says the valid forms.
    """
    if text == "iid":
        return None
    prefix, _, number = text.partition(":")
    if prefix != "dirichlet":
        raise unknown("partition", text, ["iid", "dirichlet:ALPHA"])
    if dataset == "pydoc":
        raise no_labels(text)
    try:
        alpha = float(number)
    except ValueError:
        alpha = float("nan")
    if not 1e-3 <= alpha <= 1e6:  # noqa: PLR2004 - beyond, the draw is one class a worker or no skew at all
        raise UserError(f"partition '{text}': ALPHA must be a number in [0.001, 1000000]; give one like dirichlet:0.5")
    return alpha


def no_labels(partition: str) -> UserError:
    """The error for a label-skewed partition of text."""
    return UserError(f"partition '{partition}' skews class labels, and text has none; give iid")


def check_seed(seed: int) -> None:
    """Refuse a seed that the random generators do not take.

    Raises:
        UserError: says the range.
    """
    if not 0 <= seed < 2**63:
        raise UserError(f"seed {seed}: must be a whole number from 0 to {2**63 - 1}")
