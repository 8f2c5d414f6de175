"""Builds the training text of the embedded model from Python packages on PyPI.

The packages of `packages.txt` are downloaded as wheels and their Python files read straight from the archives;
nothing is installed. What is machine-written, duplicated or shared with the standard library is dropped, the rest
is written as two xz files, one to train on and one of whole packages held out for validation. `corpus.json`
records what was kept, what was dropped and why.

    python embedded/corpus.py --out carry/corpus
"""

from __future__ import annotations

import argparse
import email.parser
import hashlib
import json
import lzma
import platform
import random
import re
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from overlap import NearDuplicates, StandardLibrary, code_lines

HERE = Path(__file__).resolve().parent
END_OF_TEXT = "<|endoftext|>"
VALIDATION = frozenset({"kazoo", "lark", "sanic"})
MAX_TRAIN_XZ = 52 * 2**20
XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 2**26}]
MIN_BYTES, MAX_BYTES, MAX_LINE = 200, 200_000, 100
MAX_PACKAGE = 3_000_000  # bytes kept of one package, so that no package dominates
MAX_SHARED = 1  # windows a kept file may share with the standard library
WHEEL_TARGET = ["--python-version", "3.13", "--implementation", "cp"]
WHEEL_TARGET += [part for abi in ("cp313", "abi3", "none") for part in ("--abi", abi)]
WHEEL_TARGET += [
    part for tag in ("_2_28", "_2_27", "_2_17", "2014") for part in ("--platform", f"manylinux{tag}_x86_64")
]
WHEEL_TARGET += ["--platform", "any"]
GENERATED = re.compile(
    r"generated (by|from|with|using|automatically)|auto[- ]?generated|automatically generated|do not edit|@generated",
    re.IGNORECASE,
)
STDLIB_COPY = re.compile(
    r"(^|/)(Lib/|cpython/|backports/|_?distutils/|lib2to3/|_pyrepl/|importlib_(metadata|resources)/|tomli/|zipp/"
    r"|(typing_extensions|zipp|tomli|six|enum34|exceptiongroup)\.py$|typeshed/|pypy/|test/test_\w*/?cpython)"
)


@dataclass
class Package:
    """One wheel: what it is, and the Python files of it that were kept."""

    name: str
    version: str
    licence: str
    files: list[str] = field(default_factory=list)

    def record(self) -> dict[str, str | int | bool]:
        """The entry of this package in corpus.json."""
        size = sum(len(text.encode()) for text in self.files)
        return {
            "name": self.name,
            "version": self.version,
            "licence": self.licence,
            "files": len(self.files),
            "bytes": size,
            "validation": self.name in VALIDATION,
        }


def requirements() -> list[tuple[str, str]]:
    """The pinned packages, as (name, version) in the order of the list."""
    lines = (HERE / "packages.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return [(name, version) for name, version in pins]


def find_wheel(name: str, version: str, folder: Path) -> Path | None:
    """The wheel of a pinned package in `folder`, if it is there."""
    wanted = re.sub(r"[-_.]+", "_", name).lower()
    for path in sorted(folder.glob("*.whl")):
        project, found = path.name.split("-")[:2]
        if re.sub(r"[-_.]+", "_", project).lower() == wanted and found == version:
            return path
    return None


def fetch_wheel(name: str, version: str, folder: Path) -> Path:
    """The wheel of a pinned package, downloaded unless it is in `folder` already."""
    if (path := find_wheel(name, version, folder)) is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, *WHEEL_TARGET, "--dest", str(folder), f"{name}=={version}"], check=True)
        path = find_wheel(name, version, folder)
    if path is None:
        raise FileNotFoundError(f"no wheel for {name}=={version}")
    return path


def licence_of(archive: zipfile.ZipFile) -> str:
    """The licence that the wheel's metadata states, on one line."""
    (path,) = [item for item in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", item)]
    metadata = email.parser.Parser().parsestr(archive.read(path).decode("utf-8", "replace"), headersonly=True)
    classifiers = [item.split("::")[-1].strip() for item in metadata.get_all("Classifier", []) if "License ::" in item]
    stated = metadata.get("License-Expression") or "; ".join(classifiers) or metadata.get("License") or "not stated"
    return str(stated).strip().splitlines()[0][:120]


def unfit(path: str, data: bytes) -> str | None:
    """Why a file is dropped by its name, size or kind; None when it is not."""
    if STDLIB_COPY.search(path):
        return "standard_library_copy_by_name"
    if len(data) < MIN_BYTES:
        return "too_small"
    if len(data) > MAX_BYTES:
        return "too_large"
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return "not_utf8"
    if GENERATED.search(text[:3000]):
        return "machine_generated"
    if len(text) > MAX_LINE * max(1, text.count("\n")):
        return "long_lines"
    return "contains_end_of_text" if END_OF_TEXT in text else None


def read_package(wheel: Path, dropped: Counter[str], stdlib: StandardLibrary, seen: NearDuplicates) -> Package:
    """The files of a wheel that pass every filter."""
    with zipfile.ZipFile(wheel) as archive:
        package = Package("", "", licence_of(archive))
        for path in sorted(archive.namelist()):
            if PurePosixPath(path).suffix != ".py":
                continue
            data = archive.read(path)
            reason = unfit(path, data)
            if reason is None:
                text = data.decode("utf-8").replace("\r\n", "\n").removeprefix("\ufeff")
                lines = code_lines(text)
                shared = stdlib.shared(lines) > MAX_SHARED
                reason = "standard_library_overlap" if shared else seen.reason(lines)
            if reason is None:
                package.files.append(text)
            else:
                dropped[reason] += 1
    return package


def shuffled(packages: list[Package], seed: int) -> Iterator[str]:
    """All files, packages in random order and files in random order within each.

    Files of one package stay together because that compresses best; training shuffles the sequences anyway.
    """
    generator = random.Random(seed)
    order = generator.sample(packages, len(packages))
    for package in order:
        yield from generator.sample(package.files, len(package.files))


def write_xz(texts: Iterator[str], path: Path, limit: int) -> tuple[list[str], dict[str, str | int]]:
    """Write the texts, each followed by the end marker, until `limit` compressed bytes; the texts written."""
    compressor = lzma.LZMACompressor(filters=XZ_FILTERS)
    written: list[str] = []
    size, text_bytes, digest = 0, 0, hashlib.sha256()
    with path.open("wb") as file:
        for text in texts:
            data = (text + END_OF_TEXT).encode()
            digest.update(data)
            text_bytes += len(data)
            written.append(text)
            size += file.write(compressor.compress(data))
            if size > limit - 2**20:
                break
        size += file.write(compressor.flush())
    if size > limit:
        raise ValueError(f"{path} has {size} bytes, over the limit of {limit}")
    xz_digest = hashlib.sha256(path.read_bytes()).hexdigest()
    facts: dict[str, str | int] = {"files": len(written), "text_bytes": text_bytes, "xz_bytes": size}
    facts |= {"xz_sha256": xz_digest, "text_sha256": digest.hexdigest()}
    return written, facts


def cap(files: list[str], seed: int) -> list[str]:
    """Random files of a package up to `MAX_PACKAGE` bytes."""
    kept, total = [], 0
    for text in random.Random(seed).sample(files, len(files)):
        total += len(text.encode())
        if total > MAX_PACKAGE:
            break
        kept.append(text)
    return kept


def collect(wheels: Path, stdlib: StandardLibrary, seed: int) -> tuple[list[Package], Counter[str]]:
    """Download and filter every package of the list, the validation packages first so that they lose no files."""
    dropped: Counter[str] = Counter()
    seen = NearDuplicates()
    packages = []
    for name, version in sorted(requirements(), key=lambda pin: pin[0] not in VALIDATION):
        package = read_package(fetch_wheel(name, version, wheels), dropped, stdlib, seen)
        package.name, package.version = name, version
        found = package.files
        package.files = cap(found, seed)
        dropped["over_package_cap"] += len(found) - len(package.files)
        packages.append(package)
        print(f"{name}=={version}: {package.record()['bytes']:,} bytes, {package.licence}", flush=True)
    return packages, dropped


def build(out: Path, wheels: Path, extra_stdlib: list[Path], seed: int) -> dict[str, object]:
    """Build both parts in `out` and return the record for corpus.json."""
    folders = [Path(sysconfig.get_path("stdlib")), *extra_stdlib]
    stdlib = StandardLibrary(folders)
    print(f"standard library: {stdlib.files} files, {len(stdlib.windows):,} windows", flush=True)
    packages, dropped = collect(wheels, stdlib, seed)
    train = [package for package in packages if package.name not in VALIDATION]
    valid = [package for package in packages if package.name in VALIDATION]
    valid_texts, valid_facts = write_xz(shuffled(valid, seed), out / "valid.txt.xz", MAX_TRAIN_XZ)
    train_texts, train_facts = write_xz(shuffled(train, seed), out / "train.txt.xz", MAX_TRAIN_XZ)
    for text in (*train_texts, *valid_texts):
        stdlib.mark(code_lines(text))
    kept = sum(len(package.files) for package in packages)
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seed": seed,
        "standard_library": {
            "python": [platform.python_version(), *(folder.name for folder in extra_stdlib)],
            "files": stdlib.files,
            "windows": len(stdlib.windows),
        },
        "verification": stdlib.verification(),
        "train": train_facts,
        "valid": valid_facts,
        "files_kept": kept,
        "files_left_out_by_size_limit": kept - len(train_texts) - len(valid_texts),
        "files_dropped": dict(dropped.most_common()),
        "packages": [package.record() for package in packages],
    }


def main() -> None:
    """Parse the arguments, build the corpus and write corpus.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.txt.xz and valid.txt.xz")
    parser.add_argument("--wheels", type=Path, help="folder of downloaded wheels (default: beside --out)")
    parser.add_argument("--stdlib", type=Path, action="append", default=[], help="a further standard library folder")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wheels = options.wheels or options.out.parent / "wheels"
    for folder in (options.out, wheels):
        folder.mkdir(parents=True, exist_ok=True)
    record = build(options.out, wheels, options.stdlib, options.seed)
    (HERE / "corpus.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({key: value for key, value in record.items() if key != "packages"}, indent=1))


if __name__ == "__main__":
    main()
