"""Token log-probabilities: chunked equals unchunked, in value and gradient."""

import pytest
import torch

from headrace.objectives import language_model
from headrace.objectives.language_model import token_logprobs, weighted_nll


def setup():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(50, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 50, (37,), generator=generator)
    return hidden, weight, targets


def run(hidden, weight, targets, temperature=1.0):
    hidden = hidden.clone().requires_grad_()
    weight = weight.clone().requires_grad_()
    logp, entropy = token_logprobs(hidden, targets, lambda h: h @ weight.T, temperature=temperature)
    weighted_nll(logp, torch.linspace(0, 1, 37), 20.0).backward()
    return logp.detach(), entropy, hidden.grad, weight.grad


def test_chunked_equals_unchunked(monkeypatch):
    whole = run(*setup())
    monkeypatch.setattr(language_model, "CHUNK_ELEMENTS", 50 * 5)
    for a, b in zip(whole, run(*setup()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_values_equal_cross_entropy_at_a_temperature():
    hidden, weight, targets = setup()
    logp, entropy, _, _ = run(hidden, weight, targets, temperature=0.7)
    logits = (hidden @ weight.T) / 0.7
    expected = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(logp.double(), expected, rtol=1e-5, atol=1e-5)
    distribution = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(entropy.double(), distribution.entropy(), rtol=1e-5, atol=1e-5)


def test_nothing_selected_and_bad_temperature():
    hidden, weight, targets = setup()
    logp, entropy = token_logprobs(hidden[:0], targets[:0], lambda h: h @ weight.T)
    assert logp.shape == entropy.shape == (0,)
    with pytest.raises(ValueError, match="positive"):
        token_logprobs(hidden, targets, lambda h: h @ weight.T, temperature=0)
