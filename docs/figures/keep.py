"""Keep the runs of a suite under version control: `python docs/figures/keep.py results/paper-small`.

They go to `results/reference/NAME`, without what is large (`pushes.csv`, the checkpoint, the logs) and without the name
of the machine.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ("evals.csv", "resources.csv", "events.csv")


def keep(source: Path, kept: Path) -> None:
    """Copy what is kept of a suite's folder."""
    suite = json.loads((source / "suite.json").read_text())
    suite["file"] = f"experiments/{Path(suite['file']).name}"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    write(kept / "suite.json", suite)
    for cell in suite["cells"]:
        run = source / cell["name"]
        (kept / run.name).mkdir()
        record = json.loads((run / "run.json").read_text())
        host = record["environment"]["host"]
        record["environment"]["host"] = {key: host[key] for key in host if key not in {"hostname", "platform"}}
        write(kept / run.name / "run.json", record)
        for name in KEPT:
            shutil.copyfile(run / name, kept / run.name / name)


def write(path: Path, record: dict[str, object]) -> None:
    """Write JSON as short as it gets."""
    path.write_text(json.dumps(record, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    keep(place, ROOT / "results" / "reference" / place.resolve().name)
