"""tools/java.sh finds, installs or asks for Java; here every program it could meet is a stand-in."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "java.sh"
# What the script itself is made of; nothing else is on its PATH.
PROGRAMS = ("sh", "dirname", "readlink", "sed", "head", "tail", "mktemp", "rm", "mkdir", "chmod")


class Machine:
    """A machine with its own PATH, Java homes and package manager.

    Args:
        folder: where its files go.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.jvms, self.folder = folder / "bin", folder / "jvm", folder
        self.path.mkdir()
        self.jvms.mkdir()
        for name in PROGRAMS:
            (self.path / name).symlink_to(shutil.which(name))

    def program(self, path: Path, body: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def java(self, home: Path, version: str) -> Path:
        self.program(home / "bin" / "java", f"echo 'openjdk version \"{version}\" 2025-04-15' >&2")
        return home

    def user(self, number: int) -> None:
        self.program(self.path / "id", f"echo {number}")

    def apt(self, body: str) -> None:
        self.program(self.path / "apt-get", f'echo "$@" >> {self.folder}/apt.log\n{body}')

    def apt_calls(self) -> str:
        log = self.folder / "apt.log"
        return log.read_text() if log.exists() else ""

    def run(self, java_home: Path | None = None) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.path)} | ({"JAVA_HOME": str(java_home)} if java_home else {})
        command = [str(self.path / "sh"), str(SCRIPT), str(self.jvms)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=20, check=False)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_java_home_comes_first(machine: Machine, tmp_path: Path) -> None:
    machine.java(machine.jvms / "java-17", "17.0.15")
    home = machine.java(tmp_path / "mine", "21.0.2")
    done = machine.run(java_home=home)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{home}\n", "")


def test_an_old_java_home_is_named_and_passed_over(machine: Machine, tmp_path: Path) -> None:
    home = machine.java(tmp_path / "mine", "1.8.0_412")
    other = machine.java(machine.jvms / "java-17", "17.0.15")
    done = machine.run(java_home=home)
    assert (done.returncode, done.stdout) == (0, f"{other}\n")
    assert f"JAVA_HOME={home} holds no Java 17 or newer" in done.stderr


def test_java_on_the_path_is_followed_to_its_home(machine: Machine, tmp_path: Path) -> None:
    home = machine.java(tmp_path / "real", "17.0.15")
    (machine.path / "java").symlink_to(home / "bin" / "java")
    assert machine.run().stdout == f"{home}\n"


def test_the_lowest_version_that_will_do_is_taken(machine: Machine) -> None:
    machine.java(machine.jvms / "a-25", "25")
    machine.java(machine.jvms / "b-11", "11.0.22")
    expected = machine.java(machine.jvms / "c-17", "17.0.15")
    machine.java(machine.jvms / "d-21", "21.0.2")
    (machine.jvms / "empty").mkdir()
    assert machine.run().stdout == f"{expected}\n"


def test_root_with_apt_installs_it_and_says_so_in_a_line(machine: Machine) -> None:
    machine.user(0)
    home = machine.jvms / "java-17"
    java = f"mkdir -p {home}/bin; echo 'echo version \\\"17.0.15\\\"' > {home}/bin/java; chmod 755 {home}/bin/java"
    machine.apt(f"if [ $1 = install ]; then {java}; fi")
    done = machine.run()
    assert (done.returncode, done.stdout) == (0, f"{home}\n")
    assert done.stderr == "no Java 17 or newer was found: installing openjdk-17-jre-headless with apt-get\n"
    assert machine.apt_calls() == "update\ninstall -y --no-install-recommends openjdk-17-jre-headless\n"


def test_a_failed_installation_shows_why(machine: Machine) -> None:
    machine.user(0)
    machine.apt("echo 'E: no such package' >&2; exit 100")
    done = machine.run()
    assert (done.returncode, done.stdout) == (1, "")
    assert "E: no such package" in done.stderr
    assert "install a Java 17 or newer and set JAVA_HOME" in done.stderr


@pytest.mark.parametrize("user", [0, 1000])
def test_elsewhere_it_says_what_to_install(machine: Machine, user: int) -> None:
    machine.user(user)
    if user != 0:
        machine.apt("exit 0")
    done = machine.run()
    assert (done.returncode, done.stdout, machine.apt_calls()) == (1, "", "")
    assert "no Java 17 or newer was found" in done.stderr
    assert "sudo apt-get install openjdk-17-jre-headless" in done.stderr
