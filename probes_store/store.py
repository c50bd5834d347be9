"""A folder of bundles: ROOT/NAME/VERSION/, and ROOT/NAME/aliases.json, the only file in it that changes.

A version appears by one rename, so readers see a complete bundle or none.  Publishers need no lock: a rename onto an
existing version fails, and the next number is tried.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from probes_store.bundle import Bundle, BundleDraft, load_bundle, render, timestamp, write_files, write_manifest
from probes_store.durable import atomic_write, clean_aside, folder_aside, locked, sync_folder, writing
from probes_store.errors import BadValue, BundleConflict, BundleDamaged, BundleError, BundleNotFound, InvalidReference
from probes_store.manifest import MANIFEST, NAME, Manifest, read_manifest, sealed
from probes_store.reference import VERSION, check_name, parse_reference
from probes_store.strict import parse_json, readable_json

SHIPPED = Path(__file__).parent / "shipped"  # bundles that come with the package, used as a fallback
ALIASES = "aliases.json"
ORIGIN = ".origin.json"  # in a bundle's folder: where it was pulled from; a hidden file is no part of a bundle
PRODUCTION = "production"  # the alias that a bare name resolves to, where it is set


@dataclass(frozen=True)
class BundleSummary:
    """One line of a listing.  A damaged bundle has an error and no manifest."""

    name: str
    version: int
    path: Path
    aliases: tuple[str, ...]
    manifest: Manifest | None
    error: BundleError | None

    @property
    def reference(self) -> str:
        """NAME:VERSION."""
        return f"{self.name}:{self.version}"


Summaries = list[BundleSummary]


class Store:
    """Bundles under ``root``; names that it lacks are looked up in the read-only ``fallbacks``."""

    def __init__(self, root: Path, fallbacks: Sequence[Path] = ()) -> None:
        self.root = Path(root)
        self.fallbacks = tuple(Path(fallback) for fallback in fallbacks)

    def check_writable(self) -> None:
        """Create the root and test that it can be written, before long work.  Raises StoreNotWritable."""
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                pass

    def publish(self, draft: BundleDraft) -> Bundle:
        """Publish a draft as the next version of its name, or return the version that has the same content.

        Raises what ``render`` raises for a draft that would not load, and StoreNotWritable.
        """
        name = check_name(draft.manifest.name, "a bundle")
        manifest, files = render(draft)
        folder = self.root / name
        existing = self._same_content(folder, manifest.digest)
        if existing is not None:
            return existing
        with writing(self.root):
            folder.mkdir(parents=True, exist_ok=True)
            _inside(self.root, folder)
            clean_aside(folder)
            with folder_aside(folder) as aside:
                write_files(aside, files)
                return self._take_version(folder, aside, manifest)

    def _take_version(self, folder: Path, aside: Path, manifest: Manifest) -> Bundle:
        """Rename the finished folder to the next free version, unless the same content was published meanwhile."""
        while True:
            # Take the number before the search: if the same content is published in between, the rename fails.
            version = max(_versions(folder), default=0) + 1
            existing = self._same_content(folder, manifest.digest)
            if existing is not None:
                return existing
            write_manifest(aside, sealed(manifest, version=version, created=timestamp()))
            target = folder / str(version)
            try:
                os.rename(aside, target)
            except OSError:
                if target.exists():  # another publisher was faster
                    continue
                raise
            sync_folder(folder)
            sync_folder(self.root)
            return self._load_version(folder.name, target)

    def held(self, manifest: Manifest) -> Bundle | None:
        """The version of this name and number, which has the same content; None where there is none yet.

        Raises BundleConflict where it has another content, and what ``load`` raises where it is damaged.
        """
        for base in (self.root, *self.fallbacks):
            path = base / manifest.name / str(manifest.version)
            if manifest.version not in _versions(path.parent):
                continue
            found = self._load_version(manifest.name, _inside(base, path))
            if found.manifest.digest == manifest.digest:
                return found
            if base == self.root:
                raise BundleConflict(
                    "another bundle has this version already",
                    file=manifest.reference,
                    expected=found.manifest.digest,
                    found=manifest.digest,
                    cure="Take it into another store with --store, or remove the version that is here",
                )
        return None

    def check_addition(self, manifest: Manifest, origin: Mapping[str, str], take_over: bool = False) -> None:
        """Refuse an addition after which a bare name would mean another bundle, not from the same place.

        Whoever can publish a bundle chooses its name and its number: without this one could take the place of a
        bundle that a service loads by name.  Raises BundleConflict and what ``resolve`` raises.
        """
        try:
            before = self.resolve(manifest.name)
        except BundleNotFound:
            return
        moves = before.parent.parent.resolve() != self.root.resolve() or (
            PRODUCTION not in _read_aliases(self.root, manifest.name) and manifest.version > int(before.name)
        )
        if moves and not take_over and read_origin(before) != dict(origin):
            own = before.parent.parent.resolve() == self.root.resolve()
            pin = f"Pin it with 'hallutracer bundle alias {manifest.name} production {before.name}', t" if own else "T"
            raise BundleConflict(
                f"'{manifest.name}' would from now on mean this bundle; so far it means version {before.name}, "
                "which is not from there",
                file=manifest.reference,
                cure=f"{pin}ake the new one into another store with --store, or agree with --take-over",
            )

    def add(self, files: Mapping[str, bytes], origin: Mapping[str, str], *, take_over: bool = False) -> Bundle:
        """Add a version that was published elsewhere, under its own number, in one rename.

        files: the manifest's bytes and those of each file that it lists; origin: kept beside them.  Everything is
        read as ``verify`` reads it before the store is touched.  Raises what ``load_bundle``, ``held`` and
        ``check_addition`` raise, and StoreNotWritable.
        """
        with tempfile.TemporaryDirectory() as outside:
            manifest = read_manifest(files[MANIFEST])
            check_name(manifest.name, "a bundle")
            if not VERSION.fullmatch(str(manifest.version)):
                raise BadValue(
                    "no version of a store", field="version", expected="1 to 999999999", found=manifest.version
                )
            draft = Path(outside, manifest.name, str(manifest.version))
            write_files(draft, files)
            Store(Path(outside)).verify(manifest.reference)
        folder = self.root / manifest.name
        existing = self.held(manifest)
        if existing is not None:
            return existing
        self.check_addition(manifest, origin, take_over)
        with writing(self.root):
            folder.mkdir(parents=True, exist_ok=True)
            _inside(self.root, folder)
            clean_aside(folder)
            with folder_aside(folder) as aside:
                write_files(aside, {ORIGIN: readable_json(dict(origin)), **files})
                target = folder / str(manifest.version)
                try:
                    os.rename(aside, target)
                except OSError:
                    if not target.exists():
                        raise
                    existing = self.held(manifest)  # somebody else was faster: the same, or a conflict
                    if existing is None:
                        raise
                    return existing
                sync_folder(folder)
                sync_folder(self.root)
        return self._load_version(manifest.name, target)

    def _same_content(self, folder: Path, digest: str) -> Bundle | None:
        for version in sorted(_versions(folder)):
            path = folder / str(version)
            try:
                if read_manifest((path / MANIFEST).read_bytes()).digest == digest:
                    return self._load_version(folder.name, path)
            except (BundleDamaged, OSError):
                continue  # a damaged version is no substitute
        return None

    def resolve(self, reference: str) -> Path:
        """NAME, NAME@ALIAS or NAME:VERSION -> its folder.

        A bare name is the alias ``production`` where it is set, and else the highest version.  Raises InvalidReference,
        BundleNotFound, and a subclass of BundleDamaged for a damaged aliases.json.
        """
        wanted = parse_reference(reference)
        base = self._base(wanted.name)
        version = wanted.version
        if version is None:
            aliases = _read_aliases(base, wanted.name)
            if wanted.alias is None:
                version = aliases.get(PRODUCTION) or max(_versions(base / wanted.name))
            elif wanted.alias in aliases:
                version = aliases[wanted.alias]
            else:
                known = ", ".join(sorted(aliases)) or "none"
                raise BundleNotFound(
                    f"bundle {wanted.name} has no alias {wanted.alias}",
                    cure=f"Set it, or use one of its aliases: {known}",
                )
        if version not in _versions(base / wanted.name):
            known = ", ".join(map(str, sorted(_versions(base / wanted.name))))
            raise BundleNotFound(
                f"{reference} names version {version} of bundle {wanted.name}, which is not there",
                cure=f"Use one of its versions: {known}",
            )
        return _inside(base, base / wanted.name / str(version))

    def load(self, reference: str) -> Bundle:
        """Resolve and load; the whole bundle is validated.  Raises what ``resolve`` and ``load_bundle`` raise."""
        name = parse_reference(reference).name
        return self._load_version(name, self.resolve(reference))

    def verify(self, reference: str) -> Bundle:
        """``load``, and read the evaluation and the card.  Raises what ``load`` raises."""
        bundle = self.load(reference)
        bundle.evaluation()
        bundle.card()
        return bundle

    def aliases(self, name: str) -> dict[str, int]:
        """Alias -> version.  Raises InvalidReference, BundleNotFound and a subclass of BundleDamaged."""
        return _read_aliases(self._base(check_name(name, "a bundle")), name)

    def set_alias(self, name: str, alias: str, version: int) -> None:
        """Point an alias at a version that loads, in one rename: a reader sees the old or the new version.

        Raises InvalidReference, BundleNotFound, what ``load_bundle`` raises, and StoreNotWritable.
        """
        check_name(alias, "an alias")
        folder = self.root / check_name(name, "a bundle")
        if not _versions(folder):
            raise BundleNotFound(
                f"no bundle {name} in this store", cure="Publish it here first; fallbacks are only read"
            )
        self.load(f"{name}:{version}")
        with writing(folder), locked(folder):
            aliases = _read_aliases(self.root, name) | {alias: version}
            atomic_write(folder / ALIASES, readable_json(aliases))

    def list(self) -> Summaries:
        """Every version of every name, sorted, without shadowed fallbacks; damaged bundles with their error."""
        seen: dict[str, Path] = {}
        for base in (self.root, *self.fallbacks):
            for name in _names(base):
                seen.setdefault(name, base)
        return [summary for name in sorted(seen) for summary in self._summaries(seen[name], name)]

    def _summaries(self, base: Path, name: str) -> Iterator[BundleSummary]:
        aliases: dict[str, int] = {}
        shared: BundleError | None = None
        try:
            aliases = _read_aliases(base, name)
        except BundleError as error:
            shared = error  # without its aliases a name cannot be resolved: reported for each of its versions
        for version in sorted(_versions(base / name)):
            path = base / name / str(version)
            manifest, error_here = None, shared
            try:
                manifest = self._load_version(name, _inside(base, path)).manifest
            except BundleError as error:
                error_here = error
            names = tuple(sorted(alias for alias, target in aliases.items() if target == version))
            yield BundleSummary(name, version, path, names, manifest, error_here)

    def _base(self, name: str) -> Path:
        """The root or the first fallback that has a version of this name."""
        for base in (self.root, *self.fallbacks):
            if _versions(base / name):
                _inside(base, base / name)
                return base
        known = sorted({known for base in (self.root, *self.fallbacks) for known in _names(base)})
        raise BundleNotFound(
            f"no bundle {name} in {self.root}",
            cure=f"Train and publish it there, name another store, or use one of: {', '.join(known) or 'none'}",
        )

    def _load_version(self, name: str, path: Path) -> Bundle:
        bundle = load_bundle(path)
        for field, expected in (("name", name), ("version", int(path.name))):
            found = getattr(bundle.manifest, field)
            if found != expected:
                raise BadValue(
                    "the folder does not match the manifest",
                    file=f"{name}/{path.name}/{MANIFEST}",
                    field=field,
                    expected=expected,
                    found=found,
                    cure="Move the folder back to its place, or publish the bundle anew",
                )
        return bundle


def read_origin(path: Path) -> dict[str, str] | None:
    """Where the bundle in a folder was pulled from; None where it was published here, or nobody can tell."""
    try:
        origin = parse_json((path / ORIGIN).read_bytes(), ORIGIN)
    except (OSError, BundleDamaged):
        return None
    return origin if isinstance(origin, dict) else None


def _versions(folder: Path) -> set[int]:
    """Numbered folders; a folder that is still being written has no number."""
    try:
        names = os.listdir(folder)
    except OSError:
        return set()
    return {int(name) for name in names if VERSION.fullmatch(name)}


def _names(base: Path) -> Sequence[str]:
    try:
        return [name for name in os.listdir(base) if NAME.fullmatch(name) and _versions(base / name)]
    except OSError:
        return []


def _inside(base: Path, path: Path) -> Path:
    """``path``, unless a link in it leads out of the store.  Raises InvalidReference."""
    if not path.resolve().is_relative_to(base.resolve()):
        raise InvalidReference(
            "a link that leads out of the store",
            file=str(path.relative_to(base)),
            expected="a folder",
            found="a link",
            cure="Replace the link by a copy of the bundle",
        )
    return path


def _read_aliases(base: Path, name: str) -> dict[str, int]:
    """aliases.json: one object, alias -> version; no file means no alias."""
    path, shown = base / name / ALIASES, f"{name}/{ALIASES}"
    try:
        data = _inside(base, path).read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BadValue(
            f"the file cannot be read: {error.strerror}", file=shown, cure="Check its permissions"
        ) from error
    aliases = parse_json(data, shown)
    cure = "Repair it by hand or remove it, and set the aliases again"
    if not isinstance(aliases, dict):
        raise BadValue("bad value", file=shown, expected="an object", found=type(aliases).__name__, cure=cure)
    for alias, version in aliases.items():
        if not NAME.fullmatch(alias) or type(version) is not int or version < 1:
            raise BadValue(
                "bad value",
                file=shown,
                field=ascii(alias),
                expected="an alias and a version of 1 or more",
                found=repr(version),
                cure=cure,
            )
    return aliases
