"""Doctor: judgements on readings from other machines, and the exit code."""

import pytest
from rich.console import Console

from headrace import doctor
from headrace.doctor import Check, Status

X86 = "processor : 0\nflags\t\t: fpu sse2 {}\nbugs : none\n"


def test_old_python_is_missing_and_required():
    check = doctor.check_python((3, 10, 4))
    assert (check.status, check.required) == (Status.MISSING, True)
    assert doctor.check_python((3, 11, 0)).status is Status.OK


def test_other_systems_are_refused():
    assert doctor.check_system("darwin").required
    assert doctor.check_system("linux").status is Status.OK


@pytest.mark.parametrize(
    ("usable", "limit", "status"),
    [(2, None, Status.OK), (1, None, Status.WARN), (8, 1.5, Status.WARN), (8, 2.0, Status.OK)],
)
def test_two_cores_are_wanted(usable, limit, status):
    assert doctor.check_cores(usable, limit).status is status


@pytest.mark.parametrize(
    ("flags", "status", "found"),
    [
        ("avx2 avx512f avx512_bf16 amx_tile amx_bf16", Status.OK, "AMX BF16"),
        ("avx2", Status.OK, "AVX2"),
        ("sse4_2", Status.WARN, "none found"),
    ],
)
def test_vector_units(flags, status, found):
    check = doctor.check_vector_units(X86.format(flags), "x86_64")
    assert check.status is status
    assert found in check.detail


def test_arm_is_not_warned_for_lacking_avx():
    check = doctor.check_vector_units("Features\t: fp asimd bf16\n", "aarch64")
    assert check.status is Status.OK
    assert "asimd" in check.detail


def test_a_compiler_is_looked_for_and_only_advised(monkeypatch):
    monkeypatch.setenv("CXX", "clang++-18")
    assert doctor.check_compiler({"clang++-18": "/opt/clang++-18"}.get).detail == "/opt/clang++-18"
    assert doctor.check_compiler({"g++": "/usr/bin/g++"}.get).status is Status.OK
    check = doctor.check_compiler(lambda name: None)
    assert check.status is Status.WARN
    assert "g++" in check.remedy
    assert doctor.exit_code([check]) == 0


def test_missing_package_is_named():
    check = doctor.check_packages(
        ["pytest>=8", "no-such-package-here>=1", 'other-missing; extra == "dev"']
    )
    assert check.status is Status.MISSING
    assert "no-such-package-here" in check.detail
    assert "other-missing" not in check.detail


def test_one_working_sandbox_is_enough():
    checks = doctor.check_sandboxes(
        lambda: {
            "bwrap": "not installed: apt-get install bubblewrap",
            "unshare": "ok",
            "none": "ok",
        }
    )
    assert [(c.name, c.status) for c in checks] == [
        ("sandbox bwrap", Status.WARN),
        ("sandbox unshare", Status.OK),
    ]
    assert "default" in checks[1].detail
    assert doctor.exit_code(checks) == 0


def test_no_working_sandbox_fails():
    checks = doctor.check_sandboxes(lambda: {"bwrap": "not installed", "unshare": "denied"})
    assert doctor.exit_code(checks) == 1
    assert "--no-isolation" in checks[0].remedy


def test_little_memory_is_a_warning():
    assert doctor.check_memory(1 << 30).status is Status.WARN
    assert doctor.check_memory(16 << 30).status is Status.OK


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_cpu_limit_of_control_groups_version_2(tmp_path):
    assert doctor.cpu_limit(tmp_path) is None
    write(tmp_path, "proc/self/cgroup", "0::/outer/inner\n")
    write(tmp_path, "sys/fs/cgroup/outer/inner/cpu.max", "max 100000\n")
    assert doctor.cpu_limit(tmp_path) is None
    # An ancestor's limit binds too.
    write(tmp_path, "sys/fs/cgroup/outer/cpu.max", "150000 100000\n")
    assert doctor.cpu_limit(tmp_path) == 1.5


def test_cpu_limit_of_control_groups_version_1(tmp_path):
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert doctor.cpu_limit(tmp_path) is None
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n")
    assert doctor.cpu_limit(tmp_path) == 2.0


def test_memory_is_the_smaller_of_machine_and_control_group(tmp_path):
    write(tmp_path, "proc/meminfo", "MemTotal:       2048 kB\n")
    assert doctor.memory_bytes(tmp_path) == 2048 * 1024
    write(tmp_path, "sys/fs/cgroup/memory.max", "4096\n")
    assert doctor.memory_bytes(tmp_path) == 4096


def test_disk_check_accepts_a_folder_that_does_not_exist_yet(tmp_path):
    assert str(tmp_path) in doctor.check_disk(tmp_path / "runs" / "new").detail


def test_only_a_required_gap_fails():
    optional = Check("extra", Status.MISSING, "gone")
    assert doctor.exit_code([optional]) == 0
    assert doctor.exit_code([optional, Check("core", Status.MISSING, "gone", required=True)]) == 1


def test_the_table_shows_every_remedy():
    console = Console(width=120)
    with console.capture() as captured:
        console.print(doctor.render([Check("disk", Status.WARN, "1 GiB [free]", "free some")]))
    text = captured.get()
    assert "free some" in text
    assert "warn" in text
    assert "1 GiB [free]" in text
