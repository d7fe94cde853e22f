"""Byte-level tokenizers of a few tokens, on disk, for grammars over tiny vocabularies."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def write_tokenizer(path: Path, letters: str, specials: int = 1) -> Path:
    """`specials` special tokens, then one token a letter; returns the file."""
    names = [f"<special {i}>" for i in range(specials)]
    stands_for = pre_tokenizers.ByteLevel(add_prefix_space=False)
    symbols = [stands_for.pre_tokenize_str(letter)[0][0] for letter in letters]
    vocab = {token: i for i, token in enumerate([*names, *symbols])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = stands_for
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name) for name in names])
    file = path / "tokenizer.json"
    tokenizer.save(str(file))
    return file
