"""Collects the packages that a machine with a GPU and no network lacks: `make gpu-pack`.

    python scripts/gpu/pack.py [--out .gpu-pack]

The machine has the packages of `image.txt` on Python 3.12. All other packages that grpo depends on
are put into the folder as wheels, in the installed versions; `check.sh` installs them there. A
package of which PyPI has no wheel is built from its source, which must be pure Python.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
GLIBC = (17, 24, 26, 27, 28, 31, 34)  # pip wants each version named that a wheel may ask for
TARGET = {  # of the markers in requirements
    "python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux",
    "platform_machine": "x86_64", "platform_python_implementation": "CPython",
    "implementation_name": "cpython", "os_name": "posix", "platform_system": "Linux",
}  # fmt: skip


def read_image(text: str) -> dict[str, str | None]:
    """Returns the packages of an image by name, each with its version where that is written.

    Args:
        text: of `image.txt`: words `name` or `name==version`, comments after a #.
    """
    words = (word for line in text.splitlines() for word in line.partition("#")[0].split())
    pairs = (word.partition("==") for word in words)
    return {canonicalize_name(name): version or None for name, _, version in pairs}


def lacking(requirements: Iterable[str], image: Mapping[str, str | None]) -> dict[str, str]:
    """Returns the packages, with their installed versions, that an image lacks for requirements.

    Raises:
        SystemExit: the image has a package in a version that a requirement does not admit. Another
            version in front of it could break the image's other packages.
    """
    found, seen = dict[str, str](), set[str]()
    waiting = [(Requirement(r), "") for r in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({**TARGET, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        package = importlib.metadata.distribution(name)
        is_there = name in image
        if is_there and not requirement.specifier.contains(image[name] or package.version):
            raise SystemExit(f"the image has {name} {image[name]}, and {requirement} is required")
        if not is_there:
            found[name] = package.version
        # Of a package that the image has, only what its extras add can be lacking.
        for wanted in (() if is_there else ("",)) + tuple(requirement.extras):
            if f"{name}[{wanted}]" not in seen:
                seen.add(f"{name}[{wanted}]")
                waiting += [(Requirement(r), wanted) for r in package.requires or ()]
    return dict(sorted(found.items()))


def fetch(name: str, version: str, folder: Path) -> None:
    """Puts the wheel of a package for the machine into a folder, built here if PyPI has none."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in GLIBC]
    target = ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp", *platforms]
    package = ["--no-deps", f"{name}=={version}"]
    if subprocess.run([*pip, "download", *target, f"--dest={folder}", *package]).returncode:
        subprocess.run([*pip, "wheel", f"--wheel-dir={folder}", *package], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-pack")
    folder: Path = parser.parse_args().out
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    image = read_image((HERE / "image.txt").read_text(encoding="utf-8"))
    for name, version in lacking(project["dependencies"], image).items():
        fetch(name, version, folder)
    print("\n".join(sorted(wheel.name for wheel in folder.iterdir())))


if __name__ == "__main__":
    main()
