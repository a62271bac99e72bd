"""Names and seeds of rollouts depend on their place alone."""

from headrace.rollout.groups import ScoredRollout, advantages
from headrace.rollout.naming import missing_names, place, rollout_seed, session_name
from headrace.rollout.types import Outcome


def test_a_lost_rollout_keeps_its_number_and_gets_a_new_name():
    names = [session_name("rl-000007", member) for member in range(4)]
    assert names[3] == "rl-000007-03"
    assert missing_names("rl-000007", 4, kept=[names[0], names[2]], lost=[names[1], names[3]]) == [
        (1, "rl-000007-01~1"),
        (3, "rl-000007-03~1"),
    ]
    again = missing_names(
        "rl-000007",
        4,
        kept=[names[0], names[2], "rl-000007-01~1"],
        lost=[names[3], f"{names[3]}~1"],
    )
    assert again == [(3, "rl-000007-03~2")]


def test_groups_with_names_of_another_form_are_completed():
    found = missing_names("rl-000007", 3, kept=["rl-000007-8fa2e1c0"], lost=["rl-000007-aabbccdd"])
    assert len(found) == 2
    assert len(set(found)) == 2


def test_places_sort_by_number_whatever_the_attempt():
    names = ["g-999999-00", "g-000002-01~3", "g-000002-00", "g-1000000-00", "g-000002-01"]
    assert sorted(names, key=place) == [
        "g-000002-00",
        "g-000002-01~3",
        "g-000002-01",
        "g-999999-00",
        "g-1000000-00",
    ]


def test_seeds_differ_between_places_and_recipes_and_are_fixed():
    seeds = {
        rollout_seed(s, f"rl-{g:06d}", m) for s in range(3) for g in range(20) for m in range(9)
    }
    assert len(seeds) == 3 * 20 * 9
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert rollout_seed(0, "rl-000000", 0) == rollout_seed(0, "rl-000000", 0)


def test_a_second_attempt_does_not_change_who_is_padded():
    def decide(names):
        outcomes = [Outcome.OK, Outcome.OK, Outcome.OK, Outcome.ENV_FAILED]
        rewards = [0.0, 1.0, 1.0, None]
        scored = [ScoredRollout(*row) for row in zip(names, outcomes, rewards, strict=True)]
        return [(m.advantage, m.multiplicity) for m in advantages(scored, group_size=4).members]

    for group in range(8):
        names = [session_name(f"rl-{group:06d}", member) for member in range(4)]
        assert decide(names) == decide([names[0], f"{names[1]}~1", f"{names[2]}~4", names[3]])
