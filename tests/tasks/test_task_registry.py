"""Tasks are found by name, and bad options get one clear line."""

import pytest

from headrace.errors import UserError
from headrace.tasks import create_task, task_names


def test_options_reach_the_service():
    task = create_task("terminal", {"families": ["count_lines"], "level_weights": [0, 1, 0]}, None)
    assert task.name in task_names()
    kinds = {(task.instance(s).family, task.instance(s).level) for s in range(20)}
    assert kinds == {("count_lines", 2)}


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("terminals", {}, "did you mean 'terminal'"),
        ("zzz", {}, "known: terminal, reasoning"),
        ("terminal", {"familys": []}, "did you mean 'families'"),
        ("terminal", {"families": ["count_line"]}, "did you mean 'count_lines'"),
        ("terminal", {"families": ["count_lines", "count_lines"]}, "repeats"),
        ("terminal", {"level_weights": [0, 0, 0]}, "level_weights.* positive sum"),
        ("terminal", {"level_weights": [1, 2]}, "level_weights"),
        ("terminal", {"max_turns": 0}, "'max_turns' .* is 0"),
        ("terminal", {"latency": {"median_s": -1}}, "'latency.median_s' .* is -1"),
        ("terminal", {"latency": {"median": 1}}, "latency.median"),
    ],
)
def test_bad_input_gets_one_clear_line(name, options, says):
    with pytest.raises(UserError, match=says) as caught:
        create_task(name, options, None)
    assert "\n" not in str(caught.value)
