"""Recipes of bundled mixtures of experts: read, checked, named when they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.model_files import text_files
from configs.load import load
from configs.recipe import RecipeError, read_recipe


def recipe_of(folder: Path, text: str) -> Path:
    (folder / "m").mkdir()
    (folder / "m" / "upcycle.json").write_text(text)
    return folder


def test_the_moe_preset_names_a_recipe_of_experts() -> None:
    config = load("laptop-moe", environment={})
    recipe = read_recipe(config.model.path)
    assert recipe is not None and recipe.dense == "smollm2-135m"
    assert (recipe.num_experts, recipe.top_k) == (4, 2)
    assert text_files(config.model.path) == text_files(recipe.dense)


@pytest.mark.parametrize("path", ["smollm2-135m", "owner/name", "nowhere", "/tmp"])
def test_other_models_have_no_recipe(path: str) -> None:
    assert read_recipe(path) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"dense": "d", "num_experts": 0}', "num_experts"),
        ('{"dense": "d", "num_experts": 2, "top_k": 3}', "only 2 experts"),
        ('{"dense": "d", "experts": 4}', "experts"),
        ("[1]", "m.upcycle.json"),
        ("{", "m.upcycle.json"),
    ],
)
def test_a_bad_recipe_names_its_file_and_field(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        read_recipe("m", recipe_of(tmp_path, text))
