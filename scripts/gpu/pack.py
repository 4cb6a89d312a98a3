"""Collects the packages that a machine with a GPU and no network lacks: `make gpu-pack`.

    python scripts/gpu/pack.py [--out .gpu-pack]

The machine has the packages of `image.txt` on Python 3.12. All other packages that grpo depends on
are put into the folder as wheels, in the versions of `constraints.txt`, with `manifest.json`.
`check.sh` installs them there. A package of which PyPI has no wheel is built from its source, which
must be pure Python.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LARGEST = 40 * 10**6  # bytes of all wheels together
GLIBC = (17, 24, 26, 27, 28, 31, 34)  # pip wants each version named that a wheel may ask for
TARGET = {  # of the markers in requirements
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "sys_platform": "linux",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_system": "Linux",
}


def read_image(text: str) -> dict[str, str | None]:
    """Returns the packages of an image by name, each with its version where that is written.

    Args:
        text: of `image.txt`: `name` or `name==version` a line, comments after a #.
    """
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pairs = (line.partition("==") for line in lines if line)
    return {canonicalize_name(name): version or None for name, _, version in pairs}


def lacking(requirements: Iterable[str], image: Mapping[str, str | None]) -> dict[str, str]:
    """Returns the packages, with their installed versions, that an image lacks for requirements.

    What each package requires is read from its installed metadata.

    Raises:
        SystemExit: the image has a package in a version that a requirement does not admit. Another
            version in front of it could break the image's other packages.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
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
            if f"{name}[{wanted}]" in seen:
                continue
            seen.add(f"{name}[{wanted}]")
            waiting += [(Requirement(r), wanted) for r in package.requires or ()]
    return dict(sorted(found.items()))


def fetch(name: str, version: str, folder: Path) -> None:
    """Puts the wheel of a package for the machine into a folder.

    Raises:
        SystemExit: there is none, and its source does not build one of pure Python.
    """
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in GLIBC]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    ready = subprocess.run(
        [*pip, "download", "--no-deps", "--only-binary=:all:", "--python-version=3.12",
         "--implementation=cp", *platforms, "--platform=manylinux2014_x86_64",
         f"--dest={folder}", f"{name}=={version}"],
        capture_output=True, text=True,
    )  # fmt: skip
    if ready.returncode == 0:
        return
    with tempfile.TemporaryDirectory(prefix="grpo-wheel-") as built:
        command = [*pip, "wheel", "--no-deps", f"--wheel-dir={built}", f"{name}=={version}"]
        made = subprocess.run(command, capture_output=True, text=True)
        wheel = next(Path(built).glob("*.whl"), None)
        if wheel is None:
            raise SystemExit(f"{name} {version}: no wheel\n{ready.stderr}{made.stderr}")
        if not wheel.name.endswith("-none-any.whl"):
            raise SystemExit(f"{name} {version}: {wheel.name} is not pure Python")
        (folder / wheel.name).write_bytes(wheel.read_bytes())


def manifest(folder: Path) -> list[dict[str, str | int]]:
    """Returns name, version and bytes of each wheel in a folder."""
    rows: list[dict[str, str | int]] = []
    for wheel in sorted(folder.glob("*.whl")):
        name, version, *_ = parse_wheel_filename(wheel.name)
        rows.append({"name": name, "version": str(version), "bytes": wheel.stat().st_size})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-pack")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    image = read_image((HERE / "image.txt").read_text(encoding="utf-8"))
    wanted = lacking(project["dependencies"], image)
    for wheel in folder.glob("*.whl"):  # of other versions, or no longer needed
        name, version, *_ = parse_wheel_filename(wheel.name)
        if wanted.get(name) != str(version):
            wheel.unlink()
    present = {row["name"] for row in manifest(folder)}
    for package, number in wanted.items():
        if package not in present:
            fetch(package, number, folder)
    rows = manifest(folder)
    (folder / "manifest.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['bytes']:>12,}  {row['name']} {row['version']}")
    total = sum(int(row["bytes"]) for row in rows)
    print(f"{total:>12,}  bytes in {len(rows)} wheels, in {folder}")
    if total > LARGEST:
        raise SystemExit(f"the wheels are larger than {LARGEST:,} bytes together")


if __name__ == "__main__":
    main()
