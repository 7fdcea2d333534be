"""Bias, penalties and the filtered draw on random settings, histories and ties, in checked mode."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from lily_mlx.kernels.sampling import NO_TOKEN, Settings, policy, reference
from tests.kernels.sampling.inputs import Case
from tests.support import to_numpy

from .profile import assert_near, fuzz, seeds

pytestmark = pytest.mark.checked

vocabularies = st.one_of(st.integers(8, 1600), st.sampled_from((511, 512, 513, 1024, 1025)))
kinds = st.sampled_from(("normal", "peaked", "ties", "equal"))
penalties = st.sampled_from((0.0, 0.0, 0.5, 1.3, 2.0))
additions = st.sampled_from((0.0, 0.0, -0.7, 0.25, 1.5))
contexts = st.integers(1, 64)


def logits_of(generator: np.random.Generator, kind: str, vocabulary: int) -> np.ndarray:
    logits = generator.standard_normal(vocabulary) * (8.0 if kind == "peaked" else 2.0)
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "equal":
        logits = np.full(vocabulary, 1.25)
    return logits.astype(np.float32)


@fuzz(
    10,
    vocabulary=vocabularies,
    kind=kinds,
    fed=st.integers(1, 80),
    before=st.integers(0, 200),
    repetition=penalties,
    presence=additions,
    frequency=additions,
    sizes=st.tuples(contexts, contexts, contexts),
    biases=st.integers(0, 12),
    temperature=st.sampled_from((0.0, 0.8)),
    filtered=st.booleans(),
    seed=seeds(),
)
def test_adjust(
    vocabulary, kind, fed, before, repetition, presence, frequency, sizes, biases, temperature, filtered, seed
):
    generator = np.random.default_rng(seed)
    settings = Settings(
        temperature=temperature,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_context_size=sizes[0],
        presence_context_size=sizes[1],
        frequency_context_size=sizes[2],
    )
    pool = generator.integers(0, vocabulary, 6)
    slots = max(settings.recent_size, 8)
    recent = np.full(slots, NO_TOKEN, np.uint32)
    if before:
        recent = reference.remember(recent, generator.choice(pool, before).astype(np.uint32), np.array([before - 1]))
    ids = generator.permutation(vocabulary)[:biases]
    case = Case(
        logits_of(generator, kind, vocabulary),
        settings,
        generator.choice(pool, fed).tolist(),
        before + fed - 1,
        seed % 1000,
        recent,
        {int(i): float(generator.normal()) for i in ids},
    )
    adjusted, after, value, index, total = case.adjust(filtered)
    want, want_after, noisy, _, _ = case.adjust_reference(filtered)
    assert_near("adjusted", adjusted, want, 2e-6)
    assert np.array_equal(np.array(after), want_after)
    # Parts: the kernel's own logits decide, so that rounding cannot.
    own = to_numpy(adjusted)[0]
    parts = [slice(start, start + policy.SLICE) for start in range(0, vocabulary, policy.SLICE)]
    if filtered:
        assert np.array_equal(to_numpy(value), [own[part].max() for part in parts])
        assert_near("total", total, np.array([np.exp(own[part] - own[part].max()).sum() for part in parts]), 1e-5)
        return
    for number, part in enumerate(parts):
        chosen = int(np.array(index)[number])
        assert part.start <= chosen < min(part.stop, vocabulary)
        lead = noisy[part].max() - noisy[chosen]
        assert lead <= 1e-4 * max(1.0, np.abs(noisy).max()), f"part {number}: {chosen} is {lead} behind the best"


@fuzz(
    14,
    vocabulary=vocabularies,
    kind=kinds,
    top_p=st.sampled_from((0.0, 0.1, 0.5, 0.9, 0.999)),
    min_p=st.sampled_from((0.0, 0.02, 0.3, 1.0)),
    least=st.integers(1, 40),
    top_k=st.one_of(st.just(0), st.integers(1, 50), st.integers(1, 2000)),
    xtc=st.sampled_from((0.0, 0.5, 1.0)),
    threshold=st.sampled_from((0.0, 0.01, 0.1, 0.5)),
    special=st.integers(0, 8),
    temperature=st.sampled_from((0.3, 1.0, 4.0)),
    seed=seeds(),
)
def test_draw(vocabulary, kind, top_p, min_p, least, top_k, xtc, threshold, special, temperature, seed):
    generator = np.random.default_rng(seed)
    settings = Settings(temperature, top_p, min_p, least, top_k, xtc, threshold)
    logits = logits_of(generator, kind, vocabulary)
    likely = np.argsort(-logits)[:20]
    case = Case(logits, settings, seed=seed % 100_000, special=generator.permutation(likely)[:special].tolist())
    token, kept = case.draw()
    assert kept[token], "the token is none of those that were kept"
    assert any(np.array_equal(kept, want) for want in _allowed(case)), f"{kept.sum()} tokens were kept"
    noisy = logits.astype(np.float64) / temperature + reference.noise(case.seed, case.position, vocabulary)
    lead = noisy[kept].max() - noisy[token]
    assert lead <= 1e-4 * max(1.0, np.abs(noisy).max()), f"token {token} is {lead} behind the best"


def _allowed(case: Case):
    """The definition's tokens, and those for limits that float32 cannot tell from the given ones."""
    yield case.draw_reference()[1]
    near = (1.0, 1 - 1e-5, 1 + 1e-5)
    for p, m, t in itertools.product(near, near, near):
        settings = case.settings
        changed = replace(
            settings,
            top_p=min(settings.top_p * p, 1.0),
            min_p=min(settings.min_p * m, 1.0),
            xtc_threshold=min(settings.xtc_threshold * t, 0.5),
        )
        yield replace(case, settings=changed).draw_reference()[1]
