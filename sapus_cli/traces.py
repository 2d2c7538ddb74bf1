"""The run folder: what stands in it, writers that survive a kill, and readers. `docs/run-folder.md` is its manual.

A trace is a CSV file that only grows: one row a fact, one line a row. Rows reach the disk whole and in order, so a kill
can tear the last one at most, and readers drop that one. Anything else that does not fit the schema is damage.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import itertools
import logging
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, SupportsFloat, SupportsIndex, TypeAlias

import msgspec

from sapus_cli.errors import DamagedFileError, RunFailedError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import polars as pl

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
"""Version of the run folder's layout. Readers refuse a newer one."""

STATUSES = ("running", "finished", "failed", "interrupted")
"""The values of `status` in run.json."""

FLUSH_EVERY_S = 0.5
"""Least time between two flushes by `Trace.tick`, seconds."""

LOCK_TRIES, LOCK_PAUSE_S = 5, 0.1
RETRY_EVERY_S = 5.0
"""The same after a flush that failed."""

MOST_WAITING_BYTES = 16 << 20
"""Rows that a trace keeps in memory while the system does not take them; newer ones are dropped."""

RESERVE_BYTES = 1 << 16
"""Room that a run keeps on the disk for its last run.json."""

TraceName: TypeAlias = Literal["evals", "pushes", "resources", "events"]


class Column(NamedTuple):
    """A column of a trace.

    Attributes:
        name: as in the header, with its unit where it has one.
        dtype: name of the polars dtype; "own" is Float64, or String if a cell of the column is no number.
        meaning: what a cell says.
    """

    name: str
    dtype: Literal["Int64", "Float64", "String", "own"]
    meaning: str


_CAME_LATER = {
    "wire": "float32",
    "transport": "tcp",
    "recovery": {"worker_timeout_s": 10.0, "min_workers": 1, "max_restarts": 3, "checkpoint_every_s": 30.0},
}

EVALS = (
    Column("t_s", "Float64", "when the tested state was taken, seconds since the start"),
    Column("version", "Int64", "pushes applied to the tested state"),
    Column("samples", "Int64", "training samples behind all pushes received by then"),
    Column("epoch", "Float64", "samples / size of the training set"),
    Column("loss", "Float64", "mean loss over the test set"),
    Column("accuracy", "Float64", "fraction of the test set that is classified rightly, 0 to 1"),
    Column("worst_class", "Float64", "the same of the class that has the least of it; empty for text and `null`"),
)

PUSHES = (
    Column("t_s", "Float64", "when the server received the push, seconds since the start"),
    Column("worker", "Int64", "rank of the worker, from 0"),
    Column("seq", "Int64", "number of the push among those of its worker, from 1"),
    Column("n_steps", "Int64", "update interval: local steps since the worker's last pull"),
    Column("loss", "Float64", "mean training loss over those steps"),
    Column("version", "Int64", "version of the global state when the push was received"),
    Column("staleness", "Int64", "`version` minus the version that the worker had pulled"),
    Column("weight", "Float64", "factor by which the update was added to the global state"),
    Column("bytes_in", "Int64", "bytes of the push on the wire, header and payload"),
    Column("bytes_out", "Int64", "bytes of its reply on the wire, header and payload; 0 if it got none"),
    Column("step_s", "Float64", "seconds a local step took, mean over the interval"),
    Column("exchange_s", "Float64", "seconds the worker's exchange before this one took, less `held_s` of that one"),
    Column("held_s", "Float64", "seconds the server withheld the reply"),
    Column("reason", "String", "why the worker pushed now; `last` is the end of its budget"),
    Column("h_min", "Float64", "least update interval the strategy allowed, local steps"),
    Column("h_max", "Float64", "greatest interval after which a step was to push; steps in flight may add to it"),
)

RESOURCES = (
    Column("t_s", "Float64", "when the sample was taken, seconds since the start"),
    Column("role", "String", "`server`, `worker` or `evaluator`"),
    Column("rank", "Int64", "rank within the role, from 0"),
    Column("cpu_s", "Float64", "CPU time of the process so far, user and system, seconds"),
    Column("cpu_percent", "Float64", "CPU time since its last sample, percent of one core"),
    Column("rss_bytes", "Int64", "resident memory of the process, bytes"),
    Column("rx_bytes", "Int64", "bytes the server has received from workers so far; empty for other roles"),
    Column("tx_bytes", "Int64", "bytes the server has sent to workers so far; empty for other roles"),
    Column("gpu_percent", "Float64", "load of the GPU it computes on, percent, whoever causes it; empty without one"),
    Column("gpu_mem_bytes", "Int64", "GPU memory of the process, bytes; empty without a GPU"),
)

EVENTS = (
    Column("t_s", "Float64", "when it happened, seconds since the start; 0 before it"),
    Column("kind", "String", "what happened, a word from the list below"),
    Column("role", "String", "role of the process that it happened to"),
    Column("rank", "Int64", "rank within the role, from 0"),
    Column("detail", "String", "one sentence for the reader"),
)

TRACES: Mapping[TraceName, tuple[Column, ...]] = {
    "evals": EVALS,
    "pushes": PUSHES,
    "resources": RESOURCES,
    "events": EVENTS,
}

_COLUMNS_THAT_CAME_LATER: Mapping[TraceName, frozenset[str]] = {"evals": frozenset({"worst_class"})}
"""What older files need not have; readers give it as empty cells."""


def push_columns(own: Iterable[str]) -> tuple[Column, ...]:
    """The columns of pushes.csv for a strategy whose own info keys are `own` (its `columns`).

    Raises:
        UserError: a name is no identifier, occurs twice or is that of a standard column.
    """
    columns = list(PUSHES)
    for name in own:
        if not name.isidentifier() or any(name == column.name for column in columns):
            raise UserError(f"the strategy's column '{name}' must be an identifier, and no other column of pushes.csv")
        columns.append(Column(name, "own", "the strategy's own"))
    return tuple(columns)


Warn: TypeAlias = "Callable[[Literal['incomplete', 'complete'], str], object]"
"""Takes the kind of an event about a trace, and a sentence."""


class Trace:
    """Appends rows to one CSV file; one process and one thread write it.

    Rows wait in memory. A flush hands all of them to the system in one write without a buffer in between, so that
    what a kill of this process can tear is the end of the file. An existing file is continued; its torn last row is
    cut off first.

    Rows that the system does not take, as on a full disk, are kept for the next flush, up to `MOST_WAITING_BYTES`.

    Args:
        path: the file.
        columns: its columns, from `TRACES` or `push_columns`.
        warn: called by a flush with "incomplete" and a sentence when rows begin to wait, or are lost; with "complete"
            and a sentence when all of them were written after all.

    Attributes:
        lost: number of rows that were dropped.

    Raises:
        DamagedFileError: the file exists and has another header.
        RunFailedError: the file cannot be opened.
    """

    def __init__(self, path: Path, columns: Sequence[Column], warn: Warn = lambda _, text: log.warning(text)) -> None:
        self.path = path
        self.lost = 0
        self._warn = warn
        self._failure: str | None = None
        self._names = tuple(column.name for column in columns)
        self._known = frozenset(self._names)
        self._dtypes = tuple(column.dtype for column in columns)
        self._formats = tuple(_FORMATS[dtype] for dtype in self._dtypes)
        self._plain: dict[tuple[type, ...], _Plain] = {}
        self._plain_texts: set[str] = set()
        self._rows: list[bytes] = []
        self._unwritten = bytearray()
        self._flushed_s = -math.inf
        try:
            self._file = path.open("a+b", buffering=0)
            self._file.seek(0)
            written = self._file.read()
            self._file.truncate(written.rfind(b"\n") + 1)
        except OSError as error:
            raise RunFailedError(f"cannot write {path}: {error.strerror}") from error
        header, newline, _ = written.partition(b"\n")
        expected = ",".join(self._names)
        if not newline:
            self._rows.append(expected.encode())
        elif header != expected.encode():
            self._file.close()
            raise DamagedFileError(f"{path}: cannot be continued, its header is not '{expected}'")

    def row(self, values: Mapping[str, object] | Sequence[object]) -> None:
        """Add a row: cells by column name, or all of them in order. None and a name left out are an empty cell.

        Floats are written with every digit that they have. A line break within a text becomes a space, since a row
        is a line.

        Raises:
            ValueError: a name is no column, or the number of cells is wrong.
            TypeError: a cell is not of its column's type; a truth value never is.
        """
        if not isinstance(values, tuple) and isinstance(values, Mapping):  # the second takes as long as the row
            if not self._known.issuperset(values):
                raise ValueError(f"{self.path.name} has no column {sorted(values.keys() - self._known)}")
            cells: Sequence[object] = [values.get(name) for name in self._names]
        else:
            cells = values
            if len(cells) != len(self._names):
                raise ValueError(f"{self.path.name} has {len(self._names)} columns, not {len(cells)}")
        self._rows.append(self._plainly(cells) or self._carefully(cells))

    def _plainly(self, cells: Sequence[object]) -> bytes | None:
        """A row by way of JSON, at a fraction of the cost; None if that is not what `_carefully` would write.

        JSON has null for None, and for NaN and infinity: then there are more of them than cells without a value.
        """
        plain = self._plain.get(tuple(map(type, cells)))
        if plain is None:
            return None
        for place in plain.texts:
            if cells[place] not in self._plain_texts:
                return None
        try:
            row = _encoder.encode(cells)
        except OverflowError:
            return None  # a whole number of more than 64 bits
        if row.count(b"null") != plain.empty:
            return None
        return row.replace(b"null", b"").translate(None, b'[]"')

    def _carefully(self, cells: Sequence[object]) -> bytes:
        try:
            texts = ["" if cell is None else text(cell) for text, cell in zip(self._formats, cells, strict=True)]
        except TypeError as error:
            raise TypeError(f"{self.path.name}: {error}, in {dict(zip(self._names, cells, strict=True))}") from error
        self._remember(cells)
        return ",".join(texts).encode("utf-8", "backslashreplace")

    def _remember(self, cells: Sequence[object]) -> None:
        """Learn from a row that was written carefully whether the next one of its kind needs that."""
        kinds = tuple(map(type, cells))
        if all(kind in _PLAIN[dtype] for kind, dtype in zip(kinds, self._dtypes, strict=True)):
            places = tuple(place for place, kind in enumerate(kinds) if kind is str)
            self._plain[kinds] = _Plain(kinds.count(type(None)), places)
        for cell in cells:
            # What occurs again and again, as a reason, is among the first.
            if type(cell) is str and len(self._plain_texts) < _MOST_TEXTS and _PLAIN_TEXT.fullmatch(cell):
                self._plain_texts.add(cell)

    def tick(self, now: float) -> None:
        """Flush if rows wait and the last flush was `FLUSH_EVERY_S` ago or more, `RETRY_EVERY_S` if it failed.

        Args:
            now: seconds on a monotonic clock of the real world, also in virtual time: a kill is real.
        """
        every_s = RETRY_EVERY_S if self._failure else FLUSH_EVERY_S
        if now - self._flushed_s >= every_s and (self._rows or self._unwritten):
            self._flushed_s = now
            self.flush()

    @property
    def incomplete(self) -> bool:
        """Whether rows are lost, or the system did not take the last ones."""
        return self.lost > 0 or self._failure is not None

    def flush(self) -> None:
        """Write all rows that wait; what the system does not take goes on waiting. Nothing once the file is closed."""
        if self._file.closed:
            return
        self._gather()
        failure = None
        try:
            while self._unwritten:
                # A full disk takes a part; what follows must begin where it ended, or a row would be torn inside.
                del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            failure = error.strerror or str(error)
        before, self._failure = self._failure, failure
        if failure and not before:
            self._warn("incomplete", f"cannot write {self.path.name}: {failure}; its rows wait in memory")
        elif before and not failure and self.lost:
            self._warn("incomplete", f"{self.path.name} is written again, but {self.lost:,} rows are lost")
        elif before and not failure:
            self._warn("complete", f"{self.path.name} is written again, no row is lost")

    def _gather(self) -> None:
        if len(self._unwritten) >= MOST_WAITING_BYTES:
            self.lost += len(self._rows)
        elif self._rows:
            self._unwritten += b"\n".join(self._rows) + b"\n"
        self._rows.clear()

    @property
    def size(self) -> int:
        """Bytes of the file once everything that waits has been written."""
        waiting = len(self._unwritten) + sum(len(row) + 1 for row in self._rows)
        return os.fstat(self._file.fileno()).st_size + waiting

    def close(self) -> None:
        """Flush and close; a second call does nothing. Rows that the system still does not take are lost."""
        self.flush()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Plain(NamedTuple):
    """What is known of rows whose cells have certain types."""

    empty: int  # how many cells are None
    texts: tuple[int, ...]  # places of the texts


_encoder = msgspec.json.Encoder()
_PLAIN: Mapping[str, tuple[type, ...]] = {
    "Float64": (float, type(None)),
    "Int64": (int, type(None)),
    "String": (str, type(None)),
    "own": (float, str, type(None)),
}
_PLAIN_TEXT = re.compile(r"(?!.*null)[A-Za-z0-9 _.:-]+")
_MOST_TEXTS = 100


def _float_cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{value!r} is not a number")
    number = float(value)
    # As the rows that are written plainly, which have 1e-7 and not 1e-07.
    return _encoder.encode(number).decode() if math.isfinite(number) else repr(number)


def _int_cell(value: Any) -> str:
    if type(value) is int:
        return repr(value)
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{value!r} is not a whole number")
    return repr(int(value))


_AWKWARD = re.compile(r'[,"\r\n]')
_BREAK = re.compile(r"[\r\n]+")


def _text_cell(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    if value and not _AWKWARD.search(value):
        return str(value)
    # An empty text is written as "", which is not the same as no text.
    return '"' + _BREAK.sub(" ", value).replace('"', '""') + '"'


def _own_cell(value: Any) -> str:
    return _text_cell(value) if isinstance(value, str) else _float_cell(value)


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "Float64": _float_cell,
    "Int64": _int_cell,
    "String": _text_cell,
    "own": _own_cell,
}

_QUOTED = r'"(?:[^"]|"")*"'


class _Fault(NamedTuple):
    row: int  # the first below the header is 1
    what: str


def read_trace(folder: Path, name: TraceName) -> pl.DataFrame:
    """The rows of one trace, with the dtypes of the schema; a torn last row is dropped.

    A file that is missing or has no row yet gives an empty frame. A column that came later is null in older files.

    Args:
        folder: the run folder.
        name: the file's name without `.csv`.

    Raises:
        DamagedFileError: the file cannot be read, or its header or a row before the last does not fit the schema.
    """
    path = folder / f"{name}.csv"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    except OSError as error:
        raise DamagedFileError(f"{path}: cannot be read: {error.strerror}") from error
    whole = data[: data.rfind(b"\n") + 1]
    header, _, body = whole.partition(b"\n")
    columns = _columns(path, name, header) if whole else TRACES[name]
    try:
        rows = body.decode().split("\n")[:-1]
    except UnicodeDecodeError as error:
        row = body.count(b"\n", 0, error.start) + 1
        raise DamagedFileError(f"{path}: row {row} (line {row + 1}) is not UTF-8") from error
    frame = _parse(columns, rows)
    if isinstance(frame, _Fault) and frame.row == len(rows) and len(whole) == len(data):
        frame = _parse(columns, rows[:-1])
    if isinstance(frame, _Fault):
        raise DamagedFileError(f"{path}: row {frame.row} (line {frame.row + 1}) {frame.what}")
    return _with_later_columns(frame, name)


def _with_later_columns(frame: pl.DataFrame, name: TraceName) -> pl.DataFrame:
    import polars as pl  # noqa: PLC0415 - those who only write do without it

    later = [column for column in TRACES[name] if column.name not in frame.columns]
    return frame.with_columns(pl.lit(None, dtype=getattr(pl, column.dtype)).alias(column.name) for column in later)


def _columns(path: Path, name: TraceName, header: bytes) -> tuple[Column, ...]:
    names = header.decode("utf-8", "replace").split(",")
    later = _COLUMNS_THAT_CAME_LATER.get(name, frozenset()) - {*names}
    columns = tuple(column for column in TRACES[name] if column.name not in later)
    if name == "pushes":
        try:
            columns = push_columns(names[len(PUSHES) :])
        except UserError:
            columns = ()
    if names != [column.name for column in columns]:
        raise DamagedFileError(f"{path}: row 0 (line 1) is not the header of {name}.csv, schema {SCHEMA_VERSION}")
    return columns


def _parse(columns: Sequence[Column], rows: list[str]) -> pl.DataFrame | _Fault:
    import polars as pl  # noqa: PLC0415 - those who only write do without it

    # Polars fills up a row that is too short, so the cells are counted first, commas within a quoted text aside.
    bare = pl.Series(rows, dtype=pl.String).str.replace_all(_QUOTED, "")
    misshapen = (bare.str.count_matches(",", literal=True) != len(columns) - 1) | bare.str.contains('"', literal=True)
    if misshapen.any():
        return _Fault(misshapen.arg_true()[0] + 1, f"does not have {len(columns)} cells")

    schema = dict.fromkeys((column.name for column in columns), pl.String)
    if not rows:
        cells = pl.DataFrame(schema=schema)
    else:
        cells = pl.read_csv("\n".join(rows).encode(), has_header=False, schema=schema)
    faults, parsed = [], []
    for (name, dtype, _), texts in zip(columns, cells, strict=True):
        if dtype == "String":
            parsed.append(texts)
            continue
        numbers = texts.cast(pl.Int64 if dtype == "Int64" else pl.Float64, strict=False)
        lost = (numbers.is_null() & texts.is_not_null()).arg_true()
        if len(lost) and dtype == "own":
            parsed.append(texts)
            continue
        if len(lost):
            faults.append(_Fault(lost[0] + 1, f"holds '{texts[lost[0]]}' in column '{name}', which is no {dtype}"))
        parsed.append(numbers)
    return min(faults) if faults else pl.DataFrame(parsed)


def cut(path: Path, size: int) -> None:
    """Take away from a trace what stands behind its first `size` bytes; one that is missing is left so."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        if size < file.seek(0, os.SEEK_END):
            file.truncate(size)


def cut_after(path: Path, t_s: float) -> None:
    """Take away from a trace the rows of what happened later than `t_s`, and a torn last row.

    Raises:
        DamagedFileError: a row begins with no number.
    """
    try:
        header, *rows = path.read_bytes().splitlines(keepends=True)
    except (FileNotFoundError, ValueError):
        return
    try:
        kept = [row for row in rows if row.endswith(b"\n") and float(row.partition(b",")[0]) <= t_s]
    except ValueError as error:
        raise DamagedFileError(f"{path}: {error}") from error
    temporary = path.with_suffix(".csv.tmp")
    temporary.write_bytes(header + b"".join(kept))
    temporary.replace(path)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep others from writing into a run folder, until the end of this process at the latest.

    Raises:
        UserError: somebody writes into it.
    """
    try:
        file = os.open(folder / "logs", os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{folder}: its folder logs cannot be opened: {error.strerror}; start a new run") from error
    try:
        for _ in range(LOCK_TRIES):  # who only looks holds it for a moment
            if free := _lock(file):
                break
            time.sleep(LOCK_PAUSE_S)
        if not free:
            raise UserError(f"{folder}: this run is still going on; wait for its end, or end it")
        yield
    finally:
        os.close(file)


def is_held(folder: Path) -> bool:
    """Whether a process of this machine writes into a run folder, as far as can be told."""
    try:
        file = os.open(folder / "logs", os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _lock(file, fcntl.LOCK_SH)
    finally:
        os.close(file)


def _lock(file: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True


def check_results(results: Path) -> None:
    """Check, without creating anything, that runs can be written below `results`, which need not exist yet.

    Raises:
        UserError: the nearest path above it that exists is no directory, or may not be written.
    """
    place = results.absolute()
    # A symbolic link into nowhere counts as existing: nothing can be created under its name.
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise UserError(f"cannot write results to {results}: {place} is not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"cannot write results to {results}: {place} may not be written; choose another folder")


def create_run_folder(results: Path, name: str | None, strategy: str, workers: int, seed: int) -> Path:
    """Create the folder of a new run, with its empty folders `logs` and `checkpoint`.

    Its name is `<utc time>_<strategy>_w<workers>_s<seed>`, with `_2`, `_3`, ... behind it where another run has that
    name; several processes may call this at once.

    Args:
        results: where runs are put; created if it is missing.
        name: name of the folder instead of the one above.
        strategy: name of the strategy, or `package.module:Class`.
        workers: number of workers.
        seed: the run's seed.

    Raises:
        UserError: the name is taken or is not one plain path component, or the folder cannot be created.
    """
    if name is not None and (name in {"", ".", ".."} or re.search(r"[/\\]", name) or not name.isprintable()):
        raise UserError(f"run name {name!r}: must be one folder name, without a slash")
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    stem = f"{now}_{re.sub(r'[^A-Za-z0-9_.-]+', '-', strategy)[:100]}_w{workers}_s{seed}"
    try:
        results.mkdir(parents=True, exist_ok=True)
        folder = _mkdir(results, [name] if name is not None else _numbered(stem))
        for inner in ("logs", "checkpoint"):
            (folder / inner).mkdir()
    except OSError as error:
        raise UserError(f"cannot create a run in {results}: {error.strerror}; choose another folder") from error
    return folder


def _numbered(stem: str) -> Iterable[str]:
    yield stem
    for n in itertools.count(2):
        yield f"{stem}_{n}"


def _mkdir(results: Path, names: Iterable[str]) -> Path:
    for name in names:
        try:
            (results / name).mkdir()
        except FileExistsError:
            continue
        return results / name
    raise UserError(f"the run {results / name} exists already; choose another name")


class Reserve:
    """Room on the disk for the last run.json of a run, so that it can be written when nothing else can.

    It is a file without a name: when its process is gone, however it ended, so is the file. A file system that has no
    such files gives no room.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file: int | None = None
        with suppress(OSError, AttributeError):
            self._file = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            os.posix_fallocate(self._file, 0, RESERVE_BYTES)

    def write(self, path: Path, text: bytes) -> bool:
        """Write a file in the room that was kept; returns whether there was any. It can be used once."""
        if self._file is None:
            return False
        try:
            os.pwrite(self._file, text, 0)
            os.ftruncate(self._file, len(text))
            # With a directory given, Python follows the link to the file behind it.
            os.link(f"/proc/self/fd/{self._file}", path, src_dir_fd=self._file)
        except OSError:
            return False
        finally:
            self.close()
        return True

    def close(self) -> None:
        """Give the room back; a second call does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_run(folder: Path, data: Mapping[str, object], reserve: Reserve | None = None) -> None:
    """Write run.json: a reader sees the old file or the new one, never a part. One process writes it.

    Args:
        folder: the run folder.
        data: what msgspec can write as JSON. NaN and infinity become null.
        reserve: what to take if the disk is full.

    Raises:
        RunFailedError: the system does not take it, as on a full disk.
    """
    stamped = {"schema_version": SCHEMA_VERSION, **{key: data[key] for key in data if key != "schema_version"}}
    path = folder / "run.json"
    temporary = folder / "run.json.tmp"
    text = msgspec.json.format(msgspec.json.encode(stamped), indent=2) + b"\n"
    try:
        try:
            temporary.write_bytes(text)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if error.errno not in _NO_ROOM or reserve is None or not reserve.write(temporary, text):
                raise
        temporary.replace(path)
    except OSError as error:
        gone = "" if folder.is_dir() else "; the run folder was removed while the run went on"
        raise RunFailedError(f"cannot write {path}: {error.strerror}{gone}") from error


def config_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a run.json, with what older runs do not have and meant."""
    entry = record.get("config")
    return _CAME_LATER | entry if isinstance(entry, dict) else {}


def incomplete_traces(record: Mapping[str, Any]) -> list[str]:
    """Names of the files of a run whose rows were not all written, as its run.json says; runs before it none."""
    names = record.get("incomplete_traces") if record.get("traces") == "incomplete" else None
    return [f"{name}.csv" for name in names] if isinstance(names, list) else []


def read_run(folder: Path) -> dict[str, Any]:
    """What run.json says.

    Raises:
        UserError: there is no run in the folder.
        DamagedFileError: the file is no run.json, or was written by a newer sapus.
    """
    path = folder / "run.json"
    try:
        run = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"no run in {folder}: there is no run.json") from error
    except OSError as error:
        raise DamagedFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise DamagedFileError(f"{path}: is not the JSON of a run: {error}") from error
    version = run.get("schema_version")
    if type(version) is not int or version < 1:
        raise DamagedFileError(f"{path}: schema_version is {version!r}, not a number from 1")
    if version > SCHEMA_VERSION:
        raise DamagedFileError(
            f"{path}: has schema version {version}, this sapus reads up to {SCHEMA_VERSION}; update sapus"
        )
    return run


def environment() -> dict[str, object]:
    """What a run was made with, for run.json: `versions`, `host` and `git`.

    A version is None where the package is not installed. `git` is the commit of the work tree around the current
    directory and whether tracked files differ from it, or None outside of one.
    """
    import zmq  # noqa: PLC0415 - readers do without it

    packages = ("sapus", "torch", "torchvision", "numpy", "pyzmq", "msgspec", "polars")
    return {
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in packages},
            "libzmq": zmq.zmq_version(),
        },
        "host": {
            "hostname": platform.node(),
            "platform": platform.platform(),
            "cpu": _cpu_model(),
            "logical_cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "git": _git(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cpuinfo = ""
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return model[1] if model else platform.processor() or None


def _git() -> dict[str, object] | None:
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        output = subprocess.run(command, capture_output=True, check=True, text=True, timeout=2).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    commit = output.removesuffix("-dirty")
    return {"commit": commit, "dirty": commit != output}
