"""What drawing and scoring refuse; their numbers are checked by the conformance suite."""

import pytest
import torch

from headrace.ops import draw_tokens, token_logprobs


def test_draws_refuse_what_does_not_fit() -> None:
    logits, ones = torch.zeros(3, 5), torch.ones(3)
    draws = torch.zeros(3, dtype=torch.float64)
    assert draw_tokens(logits, ones, draws).ids.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="temperature"):
        draw_tokens(logits, torch.ones(2), draws)
    with pytest.raises(ValueError, match=r"draws \[3\] torch.float32"):
        draw_tokens(logits, ones, draws.float())
    with pytest.raises(ValueError, match="vocabulary"):
        draw_tokens(torch.zeros(3, 0), ones, draws)
    with pytest.raises(ValueError, match="float16"):
        draw_tokens(logits.half(), ones, draws)


def test_scores_refuse_what_does_not_fit() -> None:
    logits = torch.zeros(3, 5)
    assert token_logprobs(logits.bfloat16(), torch.zeros(3, 2, dtype=torch.int64)).shape == (3, 2)
    with pytest.raises(ValueError, match="ids"):
        token_logprobs(logits, torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="int32"):
        token_logprobs(logits, torch.zeros(3, 1, dtype=torch.int32))
    with pytest.raises(IndexError):
        token_logprobs(logits, torch.full((3, 1), 5))
