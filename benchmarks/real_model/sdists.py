"""Python packages whose source is read as a repository: which ones, and how they are downloaded."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Sdist:
    """A source distribution on PyPI.

    Attributes:
        folder: of the package in it; its name stays the first part of the paths of files.
        sha256: of the file.
    """

    name: str
    version: str
    folder: str
    sha256: str

    @property
    def file_name(self) -> str:
        """As PyPI has it."""
        return f"{self.name.replace('-', '_')}-{self.version}.tar.gz"

    def fetch(self, into: Path) -> Path:
        """The file in a folder, downloaded by pip if it is not there.

        Raises:
            RuntimeError: pip could not download it.
            ValueError: it is another file.
        """
        path, package = into / self.file_name, f"{self.name}=={self.version}"
        if not path.exists():
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", self.name]
            done = subprocess.run([*command, "-d", into, package], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"pip cannot download {package}: {done.stderr.strip().splitlines()[-1]}")
        if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != self.sha256:
            raise ValueError(f"{path} is not the source of {package}: its SHA-256 is {found}, not {self.sha256}")
        return path


def python_files(sdist: Path, folder: str) -> dict[str, str]:
    """Sources of a package by path, which begins with the last part of its folder."""
    files = {}
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if member.isfile() and path.suffix == ".py" and path.is_relative_to(folder):
                file = archive.extractfile(member)
                assert file is not None  # as it is a file
                files[path.relative_to(PurePosixPath(folder).parent).as_posix()] = file.read().decode()
    return files


# versions of 2025 and 2026, newer than the model; Apache-2.0 or MIT
SDISTS = (
    Sdist("a2a-sdk", "1.3.0", "src/a2a", "73694717de50f36aaebd57b8fc6636ecaa825eb0d4437984fa2cd17f703a6808"),
    Sdist("aisuite", "0.2.0", "aisuite", "fe82891e025101416d58c0b7bc32a1613937bf2021e2f03c237c040fcc4d53f1"),
    Sdist(
        "beeai-framework",
        "0.1.85",
        "beeai_framework",
        "9c12f3f6891569da4a76e475537dd93dec564f55a85040f3b3795a941712cfdc",
    ),
    Sdist("clideps", "0.1.8", "src/clideps", "b5624bd41779a1f4181de7de74e1f730a323fdd7e4178bc8d04944bdc8f398bb"),
    Sdist("flowmark", "0.8.0", "src/flowmark", "121f89edb8fca09d3b0d72716e53671457b5ed909eb21c17120ec5850bf053c1"),
    Sdist("liteswarm", "0.6.0", "liteswarm", "d069683726f3cb56943513d1523fc14e28320a1686dec22282f3c5720f36d077"),
    Sdist("ragbits-core", "1.6.2", "src/ragbits", "6a15c23a68577865ef234c9ed076d6c774ce806daf0cf49714a86025e43f520a"),
    Sdist(
        "strands-agents", "1.62.0", "src/strands", "8732c87f9c1ceb6ef4c5c4bd6d96b4cdf1bbfde095f1537ec2ac6fddb8d5a066"
    ),
    Sdist("verifiers", "0.4.0", "verifiers", "66cbb1e2c1ff3fd2da8e4470d4468f2cf8464852cb2f6e9a123c1254d2960aab"),
)
