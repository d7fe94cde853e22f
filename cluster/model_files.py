"""Where the text files of a model lie: tokenizer, chat template, generation config. No weights, no torch."""

from __future__ import annotations

from pathlib import Path

from cluster.text import ModelFilesError
from configs.recipe import read_recipe

BUNDLED = Path(__file__).parents[1] / "configs" / "models"
_TEXT_FILES = (
    "tokenizer*",
    "*.jinja",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
)


def text_files(path: str) -> Path:
    """The directory that `model.path` means: a folder under configs/models/, a directory, or a hub id.

    Raises:
        ModelFilesError: it is none of the three.
    """
    recipe = read_recipe(path)
    if recipe is not None:  # an upcycled model speaks as the dense one does
        return text_files(recipe.dense)
    for candidate in (BUNDLED / path, Path(path)):
        if candidate.is_dir():
            return candidate
    if path.count("/") != 1:
        raise ModelFilesError(
            f"model.path={path!r}: neither a folder under configs/models/, nor a directory, nor a hub id (owner/name)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=list(_TEXT_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelFilesError(
            f"model.path={path!r}: not to be had from the hub: {error}"
        ) from error
