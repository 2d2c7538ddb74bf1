"""How a strategy looks, the same in every figure, and the themes. Nothing here needs matplotlib."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sapus_cli.analysis import Group


Dash: TypeAlias = Literal["-"] | tuple[int, tuple[float, ...]]


class Look(NamedTuple):
    """How a group is drawn.

    Attributes:
        color: as in "#0072b2".
        marker: matplotlib's sign for it.
        dash: matplotlib's line style; lengths are in line widths.
    """

    color: str
    marker: str
    dash: Dash


class Theme(NamedTuple):
    """What a figure is made for; sizes are in points, the width in millimetres."""

    width_mm: float
    size: float
    ink: str
    faint: str
    paper: str
    line: float


THEMES: Mapping[str, Theme] = {
    "paper": Theme(183, 8, "#222222", "#d9d9d9", "#ffffff", 1.2),
    "slides": Theme(254, 15, "#222222", "#d9d9d9", "#ffffff", 2.4),
    "dark": Theme(183, 8, "#e6e6e6", "#3d3d3d", "#16181d", 1.3),
}

# Solid by its name: an empty list of lengths would stand in SVG files as one, which not every viewer draws.
SOLID: Dash = "-"
DASHED: Dash = (0, (4.0, 1.5))
DOTTED: Dash = (0, (1.2, 1.2))
DASH_DOT: Dash = (0, (5.0, 1.5, 1.2, 1.5))
_DASHES = (SOLID, DASHED, DASH_DOT, DOTTED)
_MARKERS = "osD^vP<>Xdph8"

# Any two can be told with each of the three kinds of colour blindness, the first six well (tests/test_plot.py measures
# it). As so many colours are hard to remember, marker and dash differ as well. The baseline is ink.
_TABLE: Mapping[str, tuple[str, str, Dash]] = {
    "bsp": ("#333333", "o", SOLID),
    "asp": ("#45a5dd", "^", SOLID),
    "ssp": ("#1f4fb5", "s", DASHED),
    "local-sgd": ("#009e73", "s", SOLID),
    "sapus": ("#d55e00", "D", SOLID),
    "sapus-weighted": ("#8f2d6b", "o", DASHED),
    "dssp": ("#e91359", "D", DASH_DOT),
    "dc-asgd": ("#781a13", "v", DASHED),
    "fedasync": ("#cf9a51", "<", DASH_DOT),
    "fedbuff": ("#631973", ">", DOTTED),
    "local-sgd-async": ("#b41501", "d", DASHED),
    "post-local-sgd": ("#05663d", "^", DASH_DOT),
    "adacomm": ("#9800fc", "P", DOTTED),
    "diloco": ("#7e97a2", "X", SOLID),
    "easgd": ("#ef8500", "v", DASH_DOT),
    "adpsgd": ("#4304b4", "P", DASHED),
    "lag": ("#7a5fa5", "X", DOTTED),
    "selsync": ("#c54cfc", "p", DASHED),
}

# For strategies of third parties.
_RESERVE = ("#1f78b4", "#33801f", "#b15928", "#6a3d9a", "#a6761d", "#00798c", "#e31a5c", "#5b6770")

_SHADES = (0.0, 0.3, -0.35, 0.5, -0.55)
_CONTRAST, _CONTRAST_ON_DARK = 2.5, 4.0


def look_of(strategy: str, variant: int = 0, theme: Theme = THEMES["paper"]) -> Look:
    """The look of a strategy.

    Args:
        strategy: its name; one that is not in the table gets a colour of the reserve, by a hash of the name.
        variant: 0 for the first setting of hyper-parameters in a figure, 1 for the second, ...: other dash, marker and
            lightness, same hue.
        theme: its paper decides how dark or light a colour may be.
    """
    if strategy in _TABLE:
        color, marker, dash = _TABLE[strategy]
    else:
        digest = hashlib.sha256(strategy.encode()).digest()
        color, marker = _RESERVE[digest[0] % len(_RESERVE)], _MARKERS[digest[1] % len(_MARKERS)]
        dash = _DASHES[digest[2] % len(_DASHES)]
    shade = _SHADES[variant % len(_SHADES)]
    color = mix(color, "#ffffff" if shade > 0 else "#000000", abs(shade))
    return Look(
        legible(color, theme.paper),
        _MARKERS[(_MARKERS.index(marker) + variant) % len(_MARKERS)],
        _DASHES[(_DASHES.index(dash) + variant) % len(_DASHES)],
    )


def looks(groups: Sequence[Group], theme: Theme) -> dict[str, Look]:
    """The look of every group by its label; groups of one strategy are told apart."""
    seen: dict[str, int] = {}
    found = {}
    for group in groups:
        variant = seen.get(group.strategy, 0)
        seen[group.strategy] = variant + 1
        found[group.label] = look_of(group.strategy, variant, theme)
    return found


def mix(color: str, other: str, share: float) -> str:
    """`color` with a share of `other`, 0 to 1."""
    pairs = zip(_rgb(color), _rgb(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def legible(color: str, paper: str) -> str:
    """`color`, or the nearest shade of it that can be told from `paper`."""
    dark = _luminance(paper) < 0.5  # noqa: PLR2004 - half of the light
    towards, least = ("#ffffff", _CONTRAST_ON_DARK) if dark else ("#000000", _CONTRAST)
    for percent in range(0, 100, 5):
        shade = mix(color, towards, percent / 100)
        if contrast(shade, paper) >= least:
            return shade
    return towards


def contrast(color: str, other: str) -> float:
    """Ratio of luminances as WCAG 2 defines it, 1 to 21."""
    low, high = sorted((_luminance(color), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def _luminance(color: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in _rgb(color))]  # noqa: PLR2004 - sRGB
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
