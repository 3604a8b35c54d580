"""Another build of overtone beside this one: of a commit, in a temporary worktree, or of a checkout that is built.

A folder of links makes it a package that a process finds first. The benchmarks in it are this version's, so that both
sides run the same cases.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
PACKAGE = Path("python") / "overtone"


class BuildError(RuntimeError):
    """There is no such commit, or it does not build."""


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"git does not run: {error}") from error


@contextmanager
def other_build(name: str) -> Iterator[Path]:
    """A folder to put on PYTHONPATH, for a commit's name or for the folder of a checkout that is built."""
    with tempfile.TemporaryDirectory(prefix="overtone-against-") as temporary:
        site = Path(temporary) / "site"
        if Path(name).is_dir():
            link_package(Path(name).resolve(), site)
            yield site
            return
        checkout = Path(temporary) / "checkout"
        added = _git("worktree", "add", "--detach", str(checkout), name)
        if added.returncode != 0:
            raise BuildError(f"{name}: {added.stderr.strip().splitlines()[-1]}")
        try:
            _give_extension(name, checkout)
            link_package(checkout, site)
            yield site
        finally:
            _git("worktree", "remove", "--force", str(checkout))


def has_same_kernels(name: str) -> bool:
    """Whether the C++ sources of a commit are those of this checkout, edits included."""
    return _git("diff", "--quiet", name, "--", "csrc", "setup.py").returncode == 0


def _give_extension(name: str, checkout: Path) -> None:
    """This build's extension where the sources are the same, else one of its own, which takes minutes."""
    built = list((ROOT / PACKAGE).glob("_C.*.so"))
    if has_same_kernels(name):
        for path in built:
            (checkout / PACKAGE / path.name).symlink_to(path)
        return
    print(f"building the extension of {name}: minutes", file=sys.stderr, flush=True)
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{name} does not build: {(done.stderr or done.stdout).strip().splitlines()[-1]}")


def link_package(checkout: Path, site: Path) -> None:
    """site/overtone: the checkout's package, with this version's benchmarks."""
    source, package = checkout / PACKAGE, site / "overtone"
    if not source.is_dir():
        raise BuildError(f"{checkout}: no checkout of overtone, it has no {PACKAGE}")
    package.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    (package / "triton_kernels").symlink_to(checkout / "triton_kernels")
    (package / "benchmarks").symlink_to(BENCHMARKS)
