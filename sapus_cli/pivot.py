"""Groups over the values of one condition: a column a value, a line what is the same but for it.

It arranges what `sapus_cli.analysis` computes. `docs/compare.md` says how lines are found and sorted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from sapus_cli.analysis import METRICS, OPTIONS, asked_by_suites, differing, label_words, named_setting, value_text
from sapus_cli.errors import UserError, unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sapus_cli.analysis import Estimate, Group, Row

_BEHIND = {"data": "dataset", "model_layout": "model"}
"""Conditions that say what is behind a name, and the one that has the name; `cluster.` are those behind `cluster`."""


class Column(NamedTuple):
    """The groups of one value of the condition."""

    title: str
    groups: list[Group]


class Line(NamedTuple):
    """What is the same but for the condition: its label, and its row in every column that has one."""

    label: str
    rows: list[Row | None]


class Grid(NamedTuple):
    """Rows of a comparison over the values of `key`, whose texts are `titles`; every line has as many rows."""

    key: str
    titles: list[str]
    lines: list[Line]


def conditions(groups: Iterable[Group]) -> list[str]:
    """What the groups differ in, strategy and hyper-parameters aside."""
    return list(dict.fromkeys(_name_of(key) for key in differing([_facts(group) for group in groups])))


def columns(groups: Sequence[Group], key: str) -> list[Column]:
    """The groups by their value of a condition.

    Numbers ascend; other values are in the order of the suite that all runs are of, else in that of their names. Two
    values of one name, as data sets that differ inside, have behind it what they differ in.

    Raises:
        UserError: there is no such condition, or it is the same for all groups.
    """
    _check(key, groups)
    inside = {group: {k: v for k, v in _facts(group).items() if _name_of(k) == key} for group in groups}
    contents: dict[str, list[Group]] = {}
    for group in groups:
        content = {k: v for k, v in inside[group].items() if k != "cluster"}
        contents.setdefault(repr(sorted(content.items())), []).append(group)
    found = list(contents.values())
    firsts = [inside[members[0]] for members in found]
    titles = [value_text(fact.get(key)) for fact in firsts]
    if len({*titles}) < len(titles):
        keys = [k for k in differing(firsts) if k != key]
        titles = [" ".join([title, *label_words(fact, keys)]) for title, fact in zip(titles, firsts, strict=True)]
    return sorted(map(Column, titles, found), key=_order(key, found))


def _facts(group: Group) -> dict[str, Any]:
    return named_setting(group.runs[0])


def _name_of(key: str) -> str:
    return "cluster" if key.startswith("cluster.") else _BEHIND.get(key, key)


def _check(key: str, groups: Sequence[Group]) -> None:
    names = conditions(groups)
    if key in names:
        return
    if not any(key in _facts(group) for group in groups):
        raise unknown("condition in --pivot", key, names)
    value = value_text(_facts(groups[0]).get(key))
    others = ", ".join(names) or "nothing but strategy, hyper-parameters and seed"
    raise UserError(f"--pivot {key}: is {value} for all of the runs; they differ in {others}")


def _order(key: str, found: Sequence[Sequence[Group]]) -> Any:
    asked = asked_by_suites(run for members in found for group in members for run in group.runs)

    def rank(column: Column) -> tuple[float, str, int, str]:
        value = _facts(column.groups[0]).get(key)
        number = float(value) if isinstance(value, int | float) else -math.inf
        suites = [(one.suite, one.place) for group in column.groups for run in group.runs if (one := asked.get(run))]
        return (number, *min(suites, default=("", 0)), column.title)

    return rank


def labels(found: Sequence[Column]) -> dict[str, str]:
    """The label of each group's line, by its own label.

    Groups of one line share strategy, hyper-parameters and what tells such groups apart within a column. `OPTIONS` are
    left out where the rest does that too, as a learning rate that was tuned for each column.
    """
    keys = _telling(found)
    groups = [group for column in found for group in column.groups]
    firsts: dict[str, Group] = {}
    for group in groups:
        firsts.setdefault(_line_of(group, keys), group)
    by_name: dict[str, list[str]] = {}
    for line, group in firsts.items():
        by_name.setdefault(group.plain, []).append(line)
    names: dict[str, str] = {}
    for plain, lines in by_name.items():
        facts = [_own(firsts[line], keys) for line in lines]
        different = differing(facts)
        names |= {line: " ".join([plain, *label_words(f, different)]) for line, f in zip(lines, facts, strict=True)}
    return {group.label: names[_line_of(group, keys)] for group in groups}


def _own(group: Group, keys: Sequence[str]) -> dict[str, Any]:
    facts = _facts(group)
    return {**group.runs[0].hyper_parameters, **{key: facts.get(key) for key in keys}}


def _line_of(group: Group, keys: Sequence[str]) -> str:
    return repr((group.strategy, sorted((k, value_text(v)) for k, v in _own(group, keys).items())))


def _telling(found: Sequence[Column]) -> list[str]:
    """The conditions that tell groups of a column apart that have strategy and hyper-parameters in common."""
    keys: list[str] = []
    for column in found:
        same: dict[str, list[Group]] = {}
        for group in column.groups:
            same.setdefault(_line_of(group, []), []).append(group)
        for members in same.values():
            keys += [key for key in differing([_facts(group) for group in members]) if key not in keys]
    for option in reversed(OPTIONS):
        fewer = [key for key in keys if key != option]
        if all(len({_line_of(group, fewer) for group in column.groups}) == len(column.groups) for column in found):
            keys = fewer
    return keys


def split(groups: Sequence[Group], key: str) -> list[list[Group]]:
    """The groups of every column. From now on they are called by line and column, as in "ssp cluster=wan".

    Raises:
        UserError: as `columns`.
    """
    found = columns(groups, key)
    named = labels(found)
    for title, members in found:
        for group in members:
            group.label = " ".join([named[group.label], *label_words({key: title}, [key])])
    return [column.groups for column in found]


def arrange(rows: Sequence[Row], key: str, sort: str) -> Grid:
    """Rows of a comparison as a grid.

    Lines come first that have a figure without a bound in the most columns; among them the better one by the geometric
    mean of these, the arithmetic mean where one is not above 0.

    Args:
        rows: of groups that differ in `key`.
        key: a condition.
        sort: a metric that the rows have.

    Raises:
        UserError: as `columns`.
    """
    found = columns([row.group for row in rows], key)
    named = labels(found)
    row_of = {row.group.label: row for row in rows}
    cells: dict[str, list[Row | None]] = {}
    for place, column in enumerate(found):
        for group in column.groups:
            cells.setdefault(named[group.label], [None] * len(found))[place] = row_of[group.label]
    lines = [Line(label, members) for label, members in cells.items()]
    lines.sort(key=lambda line: _rank([row.cells[sort] for row in line.rows if row is not None], sort))
    return Grid(key, [column.title for column in found], lines)


def _rank(cells: Sequence[Estimate], sort: str) -> tuple[int, float]:
    known = [cell.value for cell in cells if cell.value is not None and not cell.bound]
    values = known or [cell.value for cell in cells if cell.value is not None]
    if not values:
        return (0, math.inf)
    if min(values) > 0:
        mean = math.exp(math.fsum(map(math.log, values)) / len(values))
    else:
        mean = math.fsum(values) / len(values)
    return (-len(known), mean if METRICS[sort].better == "less" else -mean)
