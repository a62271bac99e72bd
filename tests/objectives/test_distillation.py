"""Equation 2, with one teacher and with several, and that its gradient is the reverse KL's."""

import pytest
import torch

from headrace.objectives.distillation import distillation_advantages
from headrace.objectives.icepop import icepop


def test_the_teacher_judges_each_token_and_no_gradient_flows():
    student = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    teacher = torch.tensor([-0.5, -3.0, -0.5])
    advantages = distillation_advantages(teacher, student)
    assert not advantages.requires_grad
    assert advantages.tolist() == [0.5, -1.0, 0.0]


def test_each_prompt_has_its_teacher_or_a_mixture():
    student, nan = torch.zeros(3), float("nan")
    teachers = torch.tensor([[-1.0, nan, -1.0], [nan, -2.0, -3.0]])
    shares = torch.tensor([[1.0, 0.0, 0.25], [0.0, 1.0, 0.75]])
    assert distillation_advantages(teachers, student, shares).tolist() == [-1.0, -2.0, -2.5]


def test_the_expected_gradient_is_that_of_the_kl_from_teacher_to_student():
    """All tokens of a small vocabulary, each as often as the student samples it; group size 1."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, generator=generator, requires_grad=True)
    teacher = torch.randn(7, dtype=torch.float64, generator=generator).log_softmax(0)
    student = logits.log_softmax(0)
    old = student.detach()
    loss = icepop(
        student,
        old,
        old,
        distillation_advantages(teacher, student),
        old.exp(),
        beta=2.0,
        eps_low=0.2,
        eps_high=0.28,
    ).loss
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits)
    torch.testing.assert_close(found, wanted)


def test_shares_must_fit():
    v = torch.zeros(2, 3)
    for shares in (None, torch.ones(2, 3), torch.tensor([[2.0] * 3, [-1.0] * 3])):
        with pytest.raises(ValueError, match="shares"):
            distillation_advantages(v, v[0], shares)
    with pytest.raises(ValueError, match="one shape"):
        distillation_advantages(v[0], v[0, :2])
