"""A model's folder on machines that share no disk: named by what is in it, copied once, checked on arrival.

`share` gives every file a SHA-256 and the folder one over all of them; that digest takes the folder's place in the
configuration. An actor on the machine that has the folder hands out its files. Where an engine starts, `localise` turns
the digest back into a folder: the very same path where it holds the same content (a shared disk), else a copy in this
machine's store, fetched through Ray when it is not there yet.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from cluster.model_files import BUNDLED
from configs.schema import NGRAM_DRAFTER, ClusterConfig

log = logging.getLogger(__name__)

PREFIX = "sha256:"
STORE = Path("~/.cache/dspark-cluster/models")
SOURCE, NAMESPACE = "models", "dspark"
CHUNK_BYTES = 16 << 20
CHUNKS_UNDER_WAY = 4  # asked for before the first has arrived
ASK_TIMEOUT_S = 120.0


class ModelShareError(RuntimeError):
    """A model cannot be had on this machine, or is not what it should be; says which file."""


@dataclass(frozen=True)
class FileFacts:
    """One file of a model, `name` relative to its folder with forward slashes."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All files of a folder, by name."""

    files: tuple[FileFacts, ...]

    @property
    def digest(self) -> str:
        lines = (f"{file.sha256} {file.num_bytes} {file.name}\n" for file in self.files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @classmethod
    def of(cls, folder: Path) -> Manifest:
        """Read every file below `folder`, but for hidden ones."""
        names = sorted(path.relative_to(folder).as_posix() for path in _files(folder))
        return cls(tuple(_facts(folder, name) for name in names))


def share(config: ClusterConfig) -> tuple[ClusterConfig, dict[str, str]]:
    """`config` with digests instead of folders of this machine, and the folder of each digest."""
    folders: dict[str, str] = {}

    def named(folder: str) -> str:
        path = Path(folder).expanduser().resolve()
        digest = digest_of(path)
        folders[digest] = str(path)
        return PREFIX + digest

    model = config.model
    changes: dict[str, str] = {}
    if is_folder(model.path):
        changes["path"] = named(model.path)
    if model.drafter not in (None, "bundled", NGRAM_DRAFTER) and is_folder(str(model.drafter)):
        changes["drafter"] = named(str(model.drafter))
    shared = config.model_copy(update={"model": model.model_copy(update=changes)})
    return shared, folders


def localise(config: ClusterConfig, store: Path = STORE) -> ClusterConfig:
    """`config` with folders of this machine instead of digests; for a process of the cluster.

    Raises:
        ModelShareError: a model is not to be had, or its copy is damaged.
    """
    model = config.model
    shared = {
        name: value.removeprefix(PREFIX)
        for name in ("path", "drafter")
        if (value := getattr(model, name)) is not None and value.startswith(PREFIX)
    }
    if not shared:
        return config
    source = RaySource()
    found = {name: str(local_folder(digest, source, store)) for name, digest in shared.items()}
    return config.model_copy(update={"model": model.model_copy(update=found)})


def local_folder(digest: str, source: Source, store: Path = STORE) -> Path:
    """Where the content of that digest lies on this machine, fetched if it must be. See `localise`."""
    store = store.expanduser()
    kept = store / digest
    if kept.is_dir():  # it was checked before it got this name
        return kept
    folder, manifest = source.describe(digest)
    if manifest.digest != digest:
        raise ModelShareError(f"the list of files of model {digest[:12]} is not that of its digest")
    store.mkdir(parents=True, exist_ok=True)
    with _locked(store / f"{digest}.lock"):
        if kept.is_dir():
            return kept
        origin = Path(folder)
        if origin.is_dir() and digest_of(origin, store) == digest:
            return origin
        return _fetch(digest, manifest, source, store)


class Source:
    """Who has the files; see `ModelSource`."""

    def describe(self, digest: str) -> tuple[str, Manifest]:
        raise NotImplementedError

    def chunks(self, digest: str, file: FileFacts) -> Iterator[bytes]:
        raise NotImplementedError


class ModelSource:
    """The actor that hands out files of the folders of its machine."""

    def __init__(self, folders: dict[str, str]) -> None:
        self._folders = folders
        self._manifests: dict[str, Manifest] = {}

    def describe(self, digest: str) -> tuple[str, Manifest]:
        """The folder of a digest and its files, as they are now."""
        folder = self._folders[digest]
        if digest not in self._manifests:
            self._manifests[digest] = Manifest.of(Path(folder))
        return folder, self._manifests[digest]

    def read(self, digest: str, name: str, offset: int) -> bytes:
        """At most CHUNK_BYTES of a file that the manifest names."""
        folder, manifest = self.describe(digest)
        if name not in {file.name for file in manifest.files}:
            raise KeyError(name)
        with (Path(folder) / name).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)


def source_name(digest: str) -> str:
    """Of the `ModelSource` of a folder that was rolled out to a running cluster."""
    return f"{SOURCE}-{digest[:16]}"


class RaySource(Source):
    """The `ModelSource` actors of this cluster: that of its deployment, and those of what was rolled out since."""

    def _actor(self, digest: str) -> Any:
        import ray

        try:
            return ray.get_actor(source_name(digest), namespace=NAMESPACE)
        except ValueError:
            return ray.get_actor(SOURCE, namespace=NAMESPACE)

    def describe(self, digest: str) -> tuple[str, Manifest]:
        described: tuple[str, Manifest] = _answer(self._actor(digest).describe.remote(digest))
        return described

    def chunks(self, digest: str, file: FileFacts) -> Iterator[bytes]:
        under_way: deque[Any] = deque()
        actor = self._actor(digest)
        for offset in range(0, file.num_bytes, CHUNK_BYTES):
            under_way.append(actor.read.remote(digest, file.name, offset))
            if len(under_way) == CHUNKS_UNDER_WAY:
                yield _answer(under_way.popleft())
        yield from map(_answer, under_way)


def _answer(asked: Any) -> Any:
    import ray

    return ray.get(asked, timeout=ASK_TIMEOUT_S)


def digest_of(folder: Path, store: Path = STORE) -> str:
    """Of the content of `folder`. It is read once: as long as sizes and times stay, what was found is remembered."""
    seen = [
        (path.relative_to(folder).as_posix(), (stat := path.stat()).st_size, stat.st_mtime_ns)
        for path in sorted(_files(folder))
    ]
    key = hashlib.sha256(repr((str(folder.resolve()), seen)).encode()).hexdigest()
    note = store.expanduser() / "seen" / f"{key}.json"
    try:
        return str(json.loads(note.read_text(encoding="utf-8"))["digest"])
    except (OSError, ValueError, KeyError):
        digest = Manifest.of(folder).digest
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps({"digest": digest, "folder": str(folder)}), encoding="utf-8")
    except OSError as error:
        log.warning("the digest of %s could not be kept: %s", folder, error)
    return digest


def _fetch(digest: str, manifest: Manifest, source: Source, store: Path) -> Path:
    part = store / f"{digest}.part"
    shutil.rmtree(part, ignore_errors=True)  # of a process that ended in the middle
    total = sum(file.num_bytes for file in manifest.files)
    log.info("fetching model %s: %d files, %.1f MB", digest[:12], len(manifest.files), total / 1e6)
    for file in manifest.files:
        name = PurePosixPath(file.name)
        if name.is_absolute() or ".." in name.parts:
            raise ModelShareError(f"model {digest[:12]}: {file.name!r} lies outside its folder")
        path = part / name
        path.parent.mkdir(parents=True, exist_ok=True)
        arrived = hashlib.sha256()
        with path.open("wb") as written:
            for chunk in source.chunks(digest, file):
                written.write(chunk)
                arrived.update(chunk)
        if arrived.hexdigest() != file.sha256:
            raise ModelShareError(
                f"model {digest[:12]}: {file.name} arrived damaged (SHA-256 {arrived.hexdigest()[:12]}, "
                f"expected {file.sha256[:12]}); was it changed after it was deployed?"
            )
    part.rename(store / digest)
    return store / digest


def is_folder(path: str) -> bool:
    """Whether `model.path` or `model.drafter` means a folder of this machine: no bundled model and no hub id."""
    is_bundled = "/" not in path and (BUNDLED / path).is_dir()
    return not is_bundled and Path(path).expanduser().is_dir()


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path


def _facts(folder: Path, name: str) -> FileFacts:
    read = hashlib.sha256()
    path = folder / name
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            read.update(chunk)
    return FileFacts(name, path.stat().st_size, read.hexdigest())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process of this machine at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
