"""How a bundled mixture of experts is made from a dense model: `configs/models/<name>/upcycle.json`."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from configs.section import Section

MODELS_DIR = Path(__file__).resolve().parent / "models"
RECIPE_FILE = "upcycle.json"


class RecipeError(ValueError):
    """A recipe that cannot be followed; the message names the file or option and the field."""


class UpcycleRecipe(Section):
    """Every feed-forward of `dense` becomes `num_experts` equal experts; a router sends each token to `top_k`."""

    dense: str = Field(description="The dense model: what `model.path` would say.")
    num_experts: int = Field(4, ge=1, le=512, description="Experts of every layer.")
    top_k: int = Field(2, ge=1, description="Experts a token visits.")
    seed: int = Field(1, ge=0, description="Of the routers' noise.")
    skew: float = Field(
        0.0,
        ge=0,
        description="How much larger the first expert's mean router logit is than the last one's; 0 = even load.",
    )

    @model_validator(mode="after")
    def _visits_distinct_experts(self) -> UpcycleRecipe:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k = {self.top_k}: there are only {self.num_experts} experts; use fewer"
            )
        return self


def read_recipe(model_path: str, models_dir: Path = MODELS_DIR) -> UpcycleRecipe | None:
    """The recipe of the bundled model called `model_path`; None when it is no folder with one.

    Raises RecipeError naming the file and the field.
    """
    path = models_dir / model_path / RECIPE_FILE
    if "/" in model_path or not path.is_file():
        return None
    try:
        return checked_recipe(json.loads(path.read_text(encoding="utf-8")))
    except (RecipeError, json.JSONDecodeError) as error:
        raise RecipeError(f"{path}: {error}") from None


def checked_recipe(values: object) -> UpcycleRecipe:
    """`values` as a recipe; raises RecipeError naming the first bad field."""
    try:
        return UpcycleRecipe.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RecipeError(f"{where}: {first['msg']}" if where else first["msg"]) from None
