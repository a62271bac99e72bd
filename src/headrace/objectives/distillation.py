"""On-policy distillation: the teacher's opinion of each token the student sampled, as advantage.

Nothing is compared within a group, so groups of one rollout do. The objective that uses the
advantages is equation 1 (`icepop`). Source: arXiv 2602.15763 section 3.5, equation 2.
"""

import torch
from torch import Tensor


def distillation_advantages(
    teacher_logprobs: Tensor, logprobs: Tensor, shares: Tensor | None = None
) -> Tensor:
    """[N]: A_t = sg[ log pi_teacher(y_t) - log pi_theta(y_t) ].

    Args:
        teacher_logprobs: [N], or [K, N] of K teachers.
        logprobs: [N] of the model that is trained.
        shares: [K, N] >= 0, adding up to 1 over teachers: who judges each token. One-hot rows send
            each prompt to the teacher of its domain; a teacher without a share is not looked at.
            Needed with [K, N].

    Raises:
        ValueError: shapes do not fit, or shares do not add up to 1.
    """
    if teacher_logprobs.dim() == 1 and shares is None:
        teacher = teacher_logprobs
    elif shares is None or teacher_logprobs.dim() != 2 or shares.shape != teacher_logprobs.shape:
        raise ValueError(
            f"distillation_advantages: teachers {tuple(teacher_logprobs.shape)} need shares of "
            f"that shape, got {None if shares is None else tuple(shares.shape)}"
        )
    else:
        if not torch.all((shares >= 0) & ((shares.sum(0) - 1.0).abs() < 1e-4)):
            raise ValueError("distillation_advantages: shares must be >= 0 and add up to 1")
        teacher = (shares * torch.where(shares > 0, teacher_logprobs, 0.0)).sum(0)
    if teacher.shape != logprobs.shape:
        raise ValueError(
            f"distillation_advantages: teacher {tuple(teacher.shape)}, "
            f"logprobs {tuple(logprobs.shape)}; one shape needed"
        )
    return (teacher - logprobs).detach()
