"""A step without a token of the policy: an error while nothing was trained, a warning later, and nothing where it is
legitimate.
"""

import pytest

from rondel.core.errors import UserError
from rondel.core.events import Warned, subscribe
from rondel.core.types import DATA, POLICY, Group, Score, Task, Trajectory
from rondel.driver.phases import tell_silence


def episode(policy: str = POLICY, *, wrote: int = 0, finish: str = "stop") -> Trajectory:
    found = Trajectory(policy=policy, finish_reason=finish, score=Score(0.0))
    found.extend([5, 6])
    if wrote:
        found.extend([7] * wrote, logprobs=[-0.5] * wrote, versions=[0] * wrote)
    return found


def tell(*episodes: Trajectory, policies=(POLICY,), trained: int = 0) -> list[str]:
    said: list[str] = []
    end = subscribe(lambda event: said.append(event.message), Warned)
    try:
        tell_silence([Group(0, Task("t", "e", {}), list(episodes), 0)], policies, trained=trained)
    finally:
        end()
    return said


@pytest.mark.parametrize(
    ("episodes", "policies", "cause"),
    [
        ([episode(), episode()], [POLICY], "await chat.reply()"),
        ([episode(finish="length"), episode(finish="length")], [POLICY], "no room for an answer"),
        ([episode(), episode(DATA, wrote=3)], [POLICY], "in the 1 answers of a step"),
        ([episode(), episode("judge", wrote=2)], [POLICY, "critic"], "is played by a frozen policy"),
    ],
)
def test_nothing_can_be_learned_from_what_was_never_written(episodes, policies, cause):
    with pytest.raises(UserError) as error:
        tell(*episodes, policies=policies)
    assert cause in str(error.value)
    (said,) = tell(*episodes, policies=policies, trained=3)
    assert said == str(error.value), "what was trained before stays, and the run goes on"


def test_single_episodes_and_one_of_several_policies_may_be_silent():
    assert not tell(episode(), episode(wrote=1))
    assert not tell(episode(), episode("critic", wrote=1), policies=[POLICY, "critic"])
    assert not tell(), "what is shown has no sample"
