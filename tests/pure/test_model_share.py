"""A model's folder travels by its content: what arrives is what was sent, or it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.model_share import (
    PREFIX,
    FileFacts,
    Manifest,
    ModelShareError,
    ModelSource,
    Source,
    digest_of,
    is_folder,
    local_folder,
    share,
)
from configs.schema import ClusterConfig


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "there" / "model"
    (folder / "drafter").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (folder / "drafter" / "model.safetensors").write_bytes(b"drafts")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "note").write_text("hidden")
    return folder


class FarSource(Source):
    """The actor's own code without the actor, small chunks, and a count of what was asked for."""

    def __init__(self, folder: Path, claims: Path | None = None) -> None:
        self.digest = Manifest.of(folder).digest
        self._actor = ModelSource({self.digest: str(folder)})
        self._claims = claims
        self.num_files = 0

    def describe(self, digest: str) -> tuple[str, Manifest]:
        folder, manifest = self._actor.describe(digest)
        return str(self._claims or folder), manifest

    def chunks(self, digest: str, file: FileFacts) -> Iterator[bytes]:
        self.num_files += 1
        yield self._actor.read(digest, file.name, 0)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_copy_has_every_file_but_hidden_ones_and_is_made_once(
    model: Path, tmp_path: Path
) -> None:
    source = FarSource(model, claims=tmp_path / "nowhere")
    copy = local_folder(source.digest, source, tmp_path / "store")
    assert contents(copy) == {
        name: data for name, data in contents(model).items() if not name.startswith(".")
    }
    assert source.num_files == 3
    assert local_folder(source.digest, source, tmp_path / "store") == copy
    assert source.num_files == 3


def test_a_disk_that_is_shared_is_read_in_place(model: Path, tmp_path: Path) -> None:
    source = FarSource(model)
    assert local_folder(source.digest, source, tmp_path / "store") == model
    assert source.num_files == 0


def test_the_same_path_with_other_content_is_not_the_model(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "here"
    other.mkdir()
    (other / "config.json").write_text('{"older": true}')
    source = FarSource(model, claims=other)
    found = local_folder(source.digest, source, tmp_path / "store")
    assert found != other and Manifest.of(found).digest == source.digest


def test_a_file_that_arrives_damaged_is_refused_and_fetched_anew(
    model: Path, tmp_path: Path
) -> None:
    class Damaged(FarSource):
        def chunks(self, digest: str, file: FileFacts) -> Iterator[bytes]:
            yield from (chunk[:-1] + b"?" for chunk in super().chunks(digest, file))

    damaged = Damaged(model, claims=tmp_path / "nowhere")
    with pytest.raises(ModelShareError, match=r"config\.json arrived damaged"):
        local_folder(damaged.digest, damaged, tmp_path / "store")
    sound = FarSource(model, claims=tmp_path / "nowhere")
    assert local_folder(sound.digest, sound, tmp_path / "store").is_dir()


def test_a_list_of_files_that_is_not_the_digests_own_is_refused(
    model: Path, tmp_path: Path
) -> None:
    source = FarSource(model)
    wrong = Manifest((FileFacts("../evil", 1, "0" * 64),))

    class Lying(FarSource):
        def describe(self, digest: str) -> tuple[str, Manifest]:
            return "nowhere", wrong

    with pytest.raises(ModelShareError, match="not that of its digest"):
        local_folder(source.digest, Lying(model), tmp_path / "store")
    with pytest.raises(ModelShareError, match="outside its folder"):
        local_folder(wrong.digest, Lying(model), tmp_path / "store")
    assert not (tmp_path / "store" / "evil").exists()


def test_only_files_of_the_list_are_handed_out(model: Path) -> None:
    digest = Manifest.of(model).digest
    source = ModelSource({digest: str(model)})
    for name in ("../model/config.json", ".cache/note"):
        with pytest.raises(KeyError):
            source.read(digest, name, 0)


def test_the_digest_follows_content_and_names(model: Path, tmp_path: Path) -> None:
    first = digest_of(model, tmp_path / "store")
    assert digest_of(model, tmp_path / "store") == first == Manifest.of(model).digest
    (model / "config.json").rename(model / "renamed.json")
    second = digest_of(model, tmp_path / "store")
    (model / "renamed.json").write_text("{ }")
    assert len({first, second, digest_of(model, tmp_path / "store")}) == 3


def test_folders_become_digests_and_names_stay(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = ClusterConfig.model_validate(
        {"model": {"path": str(model), "drafter": str(model / "drafter"), "dtype": "float32"}}
    )
    shared, folders = share(config)
    assert shared.model.path.startswith(PREFIX) and str(shared.model.drafter).startswith(PREFIX)
    assert folders[shared.model.path.removeprefix(PREFIX)] == str(model)
    named = ClusterConfig.model_validate({"model": {"path": "smollm2-135m", "dtype": "float32"}})
    assert share(named) == (named, {})
    assert not is_folder("owner/name")
