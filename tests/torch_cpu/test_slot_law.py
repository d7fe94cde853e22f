"""What becomes of draft tokens when the text is known, against the acceptance rules that serve."""

from __future__ import annotations

from itertools import product
from types import ModuleType

import numpy as np
import pytest
import torch

from actors.core.sampling import SamplingParams
from actors.engine.training import slot_law
from actors.engine.training.slot_law import Draws, Slot
from kernels.noise import exponential_noise
from tests.torch_cpu.exact_law import Code, commit_laws, drafted
from tests.torch_cpu.mutation import mutant
from tests.torch_cpu.tiny_pair import TinyPair, processed

PLAIN = SamplingParams(noise_key=5)
VOCAB, GAMMA, SUPPORT, ANCHOR = 4, 2, 3, 1
MUTANTS = (
    ("torch.where(q_text >= p_text, 1.0, q_text / p_text)", "torch.where(p_text >= q_text, 1.0, p_text / q_text)"),
    (".where(q_text > 0, 0.0)", ".where(q_text > 0, 1.0)"),
)  # fmt: skip
PAIR = TinyPair.random(3, GAMMA, VOCAB, torch.float64)
BLOCKS = drafted(Code(), PAIR, ANCHOR, PLAIN, SUPPORT)


def target_law(slot: int, token: int) -> np.ndarray:
    return processed(PAIR.target[slot, token].numpy(), PLAIN)


def served_law() -> np.ndarray:
    """P(a round accepts `count` tokens and commits these): [count, y1, y2, y3], y after the commit summed out."""
    law = np.zeros((GAMMA + 1, VOCAB, VOCAB, VOCAB))
    commits = commit_laws(Code(), PAIR, ANCHOR, PLAIN, BLOCKS)[:, GAMMA]
    for path, count, token in np.argwhere(commits):
        committed = [*BLOCKS.tokens[path, :count].tolist(), int(token)]
        chance = BLOCKS.probability[path] * commits[path, count, token]
        where = (count, *committed, *[slice(None)] * (GAMMA - count))
        law[where] += chance / VOCAB ** (GAMMA - count)
    return law


def slot_at(prefix: tuple[int, ...], text: int) -> Slot:
    path = next(
        i for i, t in enumerate(BLOCKS.tokens) if tuple(t[: len(prefix)]) == prefix
    )  # q of a slot depends on the tokens before it only
    k = len(prefix)
    ids = torch.from_numpy(BLOCKS.q_ids[path, k])
    p = torch.from_numpy(target_law(k, (ANCHOR, *prefix)[-1]))[ids]
    return Slot(torch.from_numpy(BLOCKS.q_probs[path, k])[None], p[None], (ids == text)[None])


def replayed_law(module: ModuleType) -> np.ndarray:
    """The same joint law, from the target's text and the acceptance given the text."""
    law = np.zeros((GAMMA + 1, VOCAB, VOCAB, VOCAB))
    drawn = {tuple(t[:1]) for t in BLOCKS.tokens}
    for y1, y2, y3 in product(range(VOCAB), repeat=3):
        p1, p2 = target_law(0, ANCHOR)[y1], target_law(1, y1)[y2]
        p3 = target_law(2, y2)[y3]
        first = float(module.accept_probability(slot_at((), y1), "rejection"))
        second = 0.0
        if (y1,) in drawn:
            second = float(module.accept_probability(slot_at((y1,), y2), "rejection"))
        law[0, y1, y2, y3] = p1 * (1 - first) / VOCAB**2
        law[1, y1, y2, y3] = p1 * first * p2 * (1 - second) / VOCAB
        law[2, y1, y2, y3] = p1 * first * p2 * second * p3
    return law


def test_replay_over_sampled_text_has_the_law_of_serving() -> None:
    served = served_law()
    assert served.sum() == pytest.approx(1)
    np.testing.assert_allclose(replayed_law(slot_law), served, atol=1e-6)


@pytest.mark.parametrize(("old", "new"), MUTANTS)
def test_a_wrong_acceptance_has_another_law(old: str, new: str) -> None:
    broken = replayed_law(mutant(slot_law, old, new))
    assert np.abs(broken - served_law()).sum() > 0.02


def random_slot(
    seed: int, support: int = 3, vocab: int = 5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q over `support` tokens, their ids, and p over the vocabulary."""
    rng = torch.Generator().manual_seed(seed)
    p = torch.rand(vocab, generator=rng, dtype=torch.float64) + 0.02
    q = torch.rand(support, generator=rng, dtype=torch.float64) ** 2
    return q / q.sum(), torch.randperm(vocab, generator=rng)[:support], p / p.sum()


def given_text(q: torch.Tensor, ids: torch.Tensor, p: torch.Tensor, text: int, copies: int) -> Slot:
    each = (q, p[ids], ids == text)
    return Slot(*(x[None].expand(copies, -1) for x in each))


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_drawn_given_the_text_have_the_drafters_law_over_all_texts(
    rule: str, seed: int
) -> None:
    q, ids, p = random_slot(seed)
    copies, rng = 20_000, torch.Generator().manual_seed(seed)
    reached = torch.ones(copies, dtype=torch.bool)
    law = torch.zeros(len(q), dtype=torch.float64)
    for text in range(len(p)):
        slot = given_text(q, ids, p, text, copies)
        chosen = slot_law.draw(slot, rule, reached, Draws.of(slot, rng))  # type: ignore[arg-type]
        accepted = slot.is_text.gather(1, chosen[:, None])[:, 0].double().mean()
        wanted = slot_law.accept_probability(slot, rule)[0]  # type: ignore[arg-type]
        assert float(accepted) == pytest.approx(float(wanted), abs=0.015)
        law += p[text] * torch.bincount(chosen, minlength=len(q)) / copies
    torch.testing.assert_close(law, q, atol=0.01, rtol=0)


def test_coupled_acceptance_is_that_of_the_shared_noise() -> None:
    q, ids, p = random_slot(7)
    keys = torch.arange(60_000) * 7919 + 3
    noise = exponential_noise(keys, torch.full_like(keys, 9), len(p)).double()
    text = (p / noise).argmax(-1)
    draft = ids[(q / noise[:, ids]).argmax(-1)]
    for y in range(len(p)):
        seen = (draft == text)[text == y].double().mean()
        slot = given_text(q, ids, p, y, 1)
        wanted = slot_law.accept_probability(slot, "coupled")[0]
        assert float(seen) == pytest.approx(float(wanted), abs=0.02)


def test_a_draft_behind_a_refused_one_is_the_drafters_own() -> None:
    q, ids, p = random_slot(1)
    slot = given_text(q, ids, p, int(ids[0]), 20_000)
    nobody = torch.zeros(20_000, dtype=torch.bool)
    rng = torch.Generator().manual_seed(0)
    chosen = slot_law.draw(slot, "rejection", nobody, Draws.of(slot, rng))
    share = torch.bincount(chosen, minlength=len(q)) / len(chosen)
    torch.testing.assert_close(share, q.float(), atol=0.015, rtol=0)
